"""Computes a proof's reference with a plain module instead of megacore's layers.

Layouts and one process run the same layers, so a formula that is wrong in a layer is wrong on both sides.
A plain module that computes the same model, such as a class of transformers, shares no code with them.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from megacore.config import Config
from megacore.config.schema import IGNORED
from megacore.config.source import KEY, UNTOUCHED, Source, is_plain, source_of
from megacore.context_parallel.sharding import Documents
from megacore.distributed.buffers import buffers_of
from megacore.errors import ConfigError
from megacore.model.batch import Microbatch
from megacore.model.choose import layers_of
from megacore.model.flow import CROSS_ENTROPY
from megacore.model.layers import losses_of
from megacore.model.plain.exact import in_fp64
from megacore.model.stage import Stage
from megacore.tools.interchange.mapped import Mapped

FILE = "untouched.json"  # next to a reference's record
RIGHT = "the parameters of the model, all of them, under the module's names: docs/blocks.md"
Result = Tensor | tuple[Tensor, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Untouched:
    """A plain module to compare a model with: what `untouched(config)` in a model's file returns.

    Attributes:
        module: it computes the model without megacore's layers.
        call: int64 tokens ``[batch, seq]`` → logits ``[batch, seq, vocab]``. Or a tuple of the logits and of
            losses in addition to cross entropy: each a sum over the batch, under the name of the model's
            `Loss`.
        tensors: how the model's parameters correspond to the module's. None: they have the same names, and
            their shapes differ at most by a reshape.
    """

    module: nn.Module
    call: Callable[[Tensor], Result]
    tensors: Sequence[Mapped] | None = None


@dataclass(frozen=True)
class Comparison:
    """What the report says about a reference that an untouched module computed.

    Attributes:
        module: the module's class.
        names: for each parameter of the model, the module's parameters that hold it.
        not_compared: what megacore's own layers computed for the reference, because the module does not.
    """

    module: str
    names: dict[str, list[str]]
    not_compared: list[str]

    def write(self, folder: Path) -> None:
        """Write it next to a reference's record."""
        (folder / FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Comparison | None":
        """Read it from a reference's folder; None if megacore's own layers computed that reference."""
        path = folder / FILE
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def untouched_of(config: Config) -> Untouched | None:
    """Build the untouched module of a config's model, in fp64; None if it has none.

    It comes from the function `untouched` of the model's file. A plain module that megacore trains
    (`megacore.model.plain`) is its own, without the changes for tensor ranks. Raises `ConfigError` if the
    file's function is wrong.
    """
    source = source_of(config)
    if source is not None and source.untouched is not None:
        with source.blamed(f", {UNTOUCHED}"), in_fp64():
            untouched = source.untouched(config)
            if not isinstance(untouched, Untouched):
                raise TypeError(f"it returns {type(untouched).__name__}, not {__name__}.Untouched")
            return untouched

    if not is_plain(config):
        return None

    from megacore.model.plain.build import module_of

    with in_fp64():
        module: nn.Module = module_of(config, attention="eager")
    return Untouched(module, lambda tokens: plain_logits(module, tokens))


def plain_logits(module: nn.Module, tokens: Tensor) -> Tensor:
    """Call a plain module as its user would; return the logits."""
    keeps_cache = "use_cache" in inspect.signature(module.forward).parameters
    output = module(tokens, use_cache=False) if keeps_cache else module(tokens)
    logits: Tensor = getattr(output, "logits", output)
    return logits


class UntouchedReference:
    """An untouched module in place of a model in a reference's forward and backward passes.

    The weights and their updates stay the model's: `copy_weights` takes them from it, and `add_gradients`
    returns the module's gradients to it.

    Attributes:
        not_compared: what the model computes in its place, in words, in the order in which it was found.
    """

    def __init__(self, untouched: Untouched, model: Stage) -> None:
        """Raises `ConfigError` if parameters do not correspond, or the module draws dropout masks."""
        self.model, self.call = model, untouched.call
        self.module = untouched.module.double().train()
        self.source = own_function(model.config)
        self.losses = losses_of(layers_of(model.config))
        self.buffers = buffers_of([model])
        self.not_compared: dict[str, None] = dict.fromkeys(f"updates of {name}" for name in self.buffers)
        self._check_dropout()

        with self._blamed(), torch.no_grad():
            tensors = untouched.tensors
            if tensors is None:
                tensors = same_names(model, self.module)
            self.pairs = paired(tensors, model, self.module)
        for pair in self.pairs:
            if not pair.ours.requires_grad:
                pair.freeze()
        self.copy_weights()

    @classmethod
    def of(cls, model: Stage) -> "UntouchedReference | None":
        """The reference for a whole model in fp64; None if the model has no untouched module."""
        untouched = untouched_of(model.config)
        return None if untouched is None else cls(untouched, model)

    def _check_dropout(self) -> None:
        """Raise `ConfigError` if the model or the module has dropout: their masks are drawn differently."""
        right = "0: masks of the untouched module are not those of the model"
        settings = self.model.config.model
        if settings.dropout:
            raise ConfigError("model.dropout", f"{settings.dropout} is not 0", right)
        for name, inner in self.module.named_modules():
            if isinstance(inner, _DropoutNd) and inner.p:
                wrong = f"{name} of {class_name(self.module)} has dropout {inner.p}"
                raise ConfigError(settings.custom_key, wrong, right)

    def _blamed(self) -> AbstractContextManager[None]:
        """A context for the module's code, whose exceptions say that it was the module."""
        return self._module_failed() if self.source is None else self.source.blamed(f", {UNTOUCHED}")

    @contextmanager
    def _module_failed(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"the untouched module {class_name(self.module)} raised {type(error).__name__}: {error}"
            ) from error

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context for the module's forward and backward passes."""
        with self._blamed(), in_fp64():
            yield

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy the model's parameters, and buffers that correspond, into the module."""
        for pair in self.pairs:
            for name, value in pair.mapped.split(pair.ours.detach()).items():
                pair.theirs[name].copy_(value)

    def add_gradients(self) -> None:
        """Move the module's gradients to the model's parameters, in addition to what these have."""
        for pair in self.pairs:
            if pair.mapped.buffer or not pair.ours.requires_grad:
                continue
            gradients = {
                name: torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
                for name, theirs in pair.theirs.items()
            }
            gradient = pair.mapped.join(gradients)
            pair.ours.grad = gradient.clone() if pair.ours.grad is None else pair.ours.grad + gradient
            for theirs in pair.theirs.values():
                theirs.grad = None

    def sums(self, batch: Microbatch) -> dict[str, Tensor]:
        """Compute the sums of a microbatch's losses, by name, as far as the module gives them.

        Raises `ConfigError` if the module gives none.
        """
        with self.computing():
            logits, more = self._compute(batch.tokens, batch.documents)
            sums = {name: value for name, value in more.items() if self._is_comparable(name, batch)}
            if CROSS_ENTROPY.name in self.losses and CROSS_ENTROPY.name not in more:
                flat_targets = batch["targets"].flatten()
                sums[CROSS_ENTROPY.name] = F.cross_entropy(
                    logits.flatten(0, 1), flat_targets, reduction="sum"
                )
            if not sums:
                raise ValueError(f"call gives none of the model's losses, which are {', '.join(self.losses)}")
        self.not_compared |= dict.fromkeys(name for name in self.losses if name not in sums)
        return sums

    def _is_comparable(self, name: str, batch: Microbatch) -> bool:
        """Whether the module's sum of a loss is the model's: `call` knows the tokens, and neither which
        targets count, nor other documents.
        """
        loss = self.losses[name]
        counts_all = loss.over == "tokens" or not bool((batch[loss.over] == IGNORED).any())
        return counts_all and (loss.additive or batch.documents is None)

    def logits(self, batch: Microbatch) -> Tensor:
        """Logits ``[batch · seq, vocab]``, in evaluation mode."""
        self.module.eval()
        with self.computing():
            logits = self._compute(batch.tokens, batch.documents)[0].flatten(0, 1)
        self.module.train()
        return logits

    def _compute(self, tokens: Tensor, documents: Documents | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits ``[batch, seq, vocab]``, and sums of further losses.

        Each document is a separate sequence, so that the module needs neither a mask nor positions.
        """
        if documents is None:
            return self._call(tokens)
        rows, sums = list[Tensor](), dict[str, Tensor]()
        for row, bounds in zip(tokens, documents, strict=True):
            parts = [self._call(row[None, first:last]) for first, last in pairwise(bounds)]
            rows.append(torch.cat([logits for logits, _ in parts], 1))
            for _, losses in parts:
                for name, value in losses.items():
                    sums[name] = sums[name] + value if name in sums else value
        return torch.cat(rows), sums

    def _call(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the module. Raises `TypeError` or `ValueError` if it returns something else than it should."""
        result = self.call(tokens)
        logits, losses = result if isinstance(result, tuple) else (result, {})
        if not isinstance(logits, Tensor):
            raise TypeError(f"call returns {type(logits).__name__}, not logits [batch, seq, vocab]")
        if logits.dim() != 3 or logits.shape[:2] != tokens.shape:
            wrong = f"call returns {shown(logits)} for tokens {shown(tokens)}"
            raise ValueError(f"{wrong}, not logits [batch, seq, vocab]")
        for name, value in losses.items():
            if name not in self.losses:
                known = ", ".join(self.losses)
                raise ValueError(f"call returns a loss {name}, and those of the model are {known}")
            if not isinstance(value, Tensor) or value.dim():
                raise ValueError(f"call returns a loss {name} that is no scalar tensor")
        return logits, dict(losses)

    def comparison(self) -> Comparison:
        """What the report says about it, after the last step."""
        names = {pair.mapped.name: list(pair.theirs) for pair in self.pairs}
        return Comparison(class_name(self.module), names, list(self.not_compared))


@dataclass(frozen=True)
class Pair:
    """A parameter or buffer of the model, and the module's tensors that hold the same numbers."""

    mapped: Mapped
    ours: Tensor
    theirs: dict[str, Tensor]

    def freeze(self) -> None:
        """Compute no gradients of the module's tensors."""
        for theirs in self.theirs.values():
            theirs.requires_grad_(False)


def own_function(config: Config) -> Source | None:
    """The file whose function `untouched` gives the module; None if megacore builds it."""
    source = source_of(config)
    return None if source is None or source.untouched is None else source


def class_name(module: nn.Module) -> str:
    """The class of a module and the package that it is from: `transformers.LlamaForCausalLM`."""
    kind = type(module)
    package = kind.__module__.partition(".")[0]
    is_in_file = package.startswith("megacore_source_")
    return kind.__qualname__ if is_in_file else f"{package}.{kind.__qualname__}"


def shown(tensor: Tensor) -> str:
    """A tensor's shape for a message."""
    return str(list(tensor.shape))


def same_names(model: Stage, module: nn.Module) -> list[Mapped]:
    """Pair parameters, and buffers that both have, by their names; their shapes may differ by a reshape.

    A parameter without an equal is left out, because `paired` reports it.
    """
    parameters, buffers = dict(module.named_parameters(remove_duplicate=False)), dict(module.named_buffers())
    records = []
    for name, ours in model.named_parameters():
        theirs = parameters.get(name)
        if theirs is None:
            continue
        if theirs.numel() != ours.numel():
            raise mismatch(
                f"{name} has the shape {shown(theirs)} in the module and {shown(ours)} in the model"
            )
        records.append(reshaped(name, ours, theirs))
    for name, buffer in buffers_of([model]).items():
        if name in buffers:
            records.append(reshaped(name, buffer.value, buffers[name], is_buffer=True))
    return records


def reshaped(name: str, ours: Tensor, theirs: Tensor, *, is_buffer: bool = False) -> Mapped:
    """The same numbers under the same name, in another shape."""
    our_shape, their_shape = tuple(ours.shape), tuple(theirs.shape)
    return Mapped(
        name,
        our_shape,
        {name: their_shape},
        lambda tensors: tensors[name].reshape(our_shape),
        lambda tensor: {name: tensor.reshape(their_shape)},
        is_buffer,
    )


def paired(tensors: Sequence[Mapped], model: Stage, module: nn.Module) -> list[Pair]:
    """Look up the tensors of all records. Raises `ConfigError` unless every parameter of the model
    corresponds to parameters of the module, and the reverse.
    """
    our_parameters = dict(model.named_parameters())
    our_buffers = {name: buffer.value for name, buffer in buffers_of([model]).items()}
    their_parameters = dict(module.named_parameters(remove_duplicate=False))
    their_buffers = dict(module.named_buffers())
    kind = class_name(module)

    pairs, holders = [], dict[int, str]()  # by tied parameter, the model's that has it
    for record in tensors:
        ours, theirs = (our_buffers, their_buffers) if record.buffer else (our_parameters, their_parameters)
        what = "buffer" if record.buffer else "parameter"
        if record.name not in ours:
            raise mismatch(f"{record.name} is not a {what} of the model")
        for name in record.peers:
            if name not in theirs:
                raise mismatch(f"{name}, for the model's {record.name}, is not a {what} of {kind}")
            holder = holders.setdefault(id(theirs[name]), record.name)
            if holder != record.name:
                wrong = f"{record.name} and {holder} of the model are two parameters"
                raise mismatch(f"{wrong}, and one of {kind}, {name}")
        pairs.append(Pair(record, ours[record.name], {name: theirs[name] for name in record.peers}))

    known = {pair.mapped.name for pair in pairs}
    if missing := [name for name in our_parameters if name not in known]:
        raise mismatch(f"{missing[0]} of the model is no parameter of {kind}")
    if missing := [name for name, parameter in module.named_parameters() if id(parameter) not in holders]:
        raise mismatch(f"{missing[0]} of {kind} is no parameter of the model")
    for pair in pairs:
        check_shapes(pair)
    return pairs


def check_shapes(pair: Pair) -> None:
    """Raise `ConfigError` if a record does not fit its tensors, or `join` does not reverse `split`."""
    record, ours = pair.mapped, pair.ours
    if tuple(record.shape) != tuple(ours.shape):
        raise mismatch(f"{record.name} has the shape {shown(ours)}, not {list(record.shape)}")
    pieces = record.split(ours.detach())
    if pieces.keys() != record.peers.keys():
        raise mismatch(f"split of {record.name} gives {', '.join(pieces)}, not {', '.join(record.peers)}")
    for name, theirs in pair.theirs.items():
        if pieces[name].shape != theirs.shape:
            wrong = f"{name} of the module has the shape {shown(theirs)}"
            raise mismatch(f"{wrong}, and split gives it {shown(pieces[name])} of {record.name}")
    if not torch.equal(record.join(pieces), ours):
        raise mismatch(f"join does not reverse split for {record.name}")


def mismatch(wrong: str) -> ConfigError:
    """The error that names a parameter without an equal."""
    return ConfigError(KEY, f"{UNTOUCHED}: {wrong}", RIGHT)
