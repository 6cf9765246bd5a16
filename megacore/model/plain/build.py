"""Builds plain modules: as their own code makes them, without memory, and their first weights."""

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.source import source_of
from megacore.model.plain import folder
from megacore.model.plain.attention import NAME, attend
from megacore.model.plain.exact import building
from megacore.model.plain.parts import LINEAR, TABLES, Parts, parts_of_plan
from megacore.rng import key_of

POSITIONS = ("position_ids", "positions")  # what forward may call them


def module_of(config: Config, attention: str) -> nn.Module:
    """Build the module on torch's default device and in its default dtype.

    `attention`: the implementation of attention, if it is a class of transformers.
    """
    source = source_of(config)
    if source is not None and source.build is not None:
        with source.blamed(", build"):
            module: nn.Module = source.build(config)
            if not isinstance(module, nn.Module):
                raise TypeError(f"build returns a {type(module).__name__} and no torch.nn.Module")
        if hasattr(module, "set_attn_implementation"):  # a class of transformers that the file builds
            check_attention(type(module))
            register_attention()
            module.set_attn_implementation(attention)  # type: ignore[operator]
        return module

    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    settings = folder.transformers_config(config)
    check_attention(MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)])
    register_attention()
    options: dict[str, Any] = {"attn_implementation": attention, "dtype": torch.get_default_dtype()}
    if config.train.precision == "fp64":  # in which the other implementations do not compute
        options["experts_implementation"] = "eager"
    built: nn.Module = AutoModelForCausalLM.from_config(settings, **options)
    return built


def register_attention() -> None:
    """Let modules of transformers attend through megacore, by the name of its attention."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def plain_model(config: Config) -> "PlainModel":
    """Return the config's module and its table; made once for configs that differ in neither."""
    return _plain_model(_Key(config))


class PlainModel:
    """A plain module without memory, and where its parts are.

    Attributes:
        module: with its parameters on `meta`; what stays the same, such as rotary frequencies, is on the CPU.
        parts: the table.
        blocks: the places of its blocks, in order.
        embedding: the place of the table of tokens.
        head: the place of the linear module that makes logits.
        tied: whether the last two have one weight.
        outer: the places of other modules with parameters, outside of the blocks.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.source = config, source_of(config)
        self.is_transformers = self.source is None or self.source.build is None
        with building(config.train.precision):
            self.module = self._without_memory()
        self.parts = Parts(self._table())
        check_dropout(self.module)
        self.blocks = self._find_blocks()
        self._check_places()
        self.embedding = self._find_end("embedding", nn.Embedding, "get_input_embeddings")
        self.head = self._find_end("head", nn.Linear, "get_output_embeddings")
        self.tied = self._find_tied()
        self.outer = list(self._find_outer("", self.module))
        self.attends_by_name = hasattr(self.module, "set_attn_implementation")
        self.takes = set(inspect.signature(type(self.module).forward).parameters)

    @property
    def takes_positions(self) -> bool:
        """Whether the module's forward can be told where tokens are."""
        return not self.takes.isdisjoint(POSITIONS)

    def options(self, positions: Tensor) -> dict[str, Any]:
        """Return what the module's forward is called with besides tokens."""
        options: dict[str, Any] = {name: positions for name in POSITIONS if name in self.takes}
        return options | ({"use_cache": False} if "use_cache" in self.takes else {})

    def part(self, place: str) -> nn.Module:
        """Return a part of the module for a layer to keep and change."""
        return copy.deepcopy(self.module.get_submodule(place))

    def _without_memory(self) -> nn.Module:
        """Build the module with its parameters on `meta`."""
        if not self.is_transformers:
            # Its constructor may compute, so it runs in memory. What it draws is drawn again when needed.
            with torch.random.fork_rng(devices=[]):
                module = module_of(self.config, NAME)
            to_meta(module)
            return module
        with torch.device("meta"):
            module = module_of(self.config, NAME)
        for inner in module.modules():
            make_buffers(module, inner)
        return module

    def _table(self) -> Mapping[str, str]:
        if self.source is not None and self.source.parts is not None:
            return self.source.parts
        settings: Any = self.module.config
        plan = getattr(settings, "base_model_tp_plan", None)
        kind = settings.model_type
        if plan is None and kind not in TABLES:
            raise ValueError(f"{type(self.module).__name__} comes without a plan of what tensor ranks divide")
        return TABLES[kind] if plan is None else parts_of_plan(plan, type(self.module).__name__)

    def _find_blocks(self) -> list[str]:
        number, place = self.config.model.num_layers, self.parts.end("blocks")
        lists = {
            name: module for name, module in self.module.named_modules() if isinstance(module, nn.ModuleList)
        }
        if place is None:
            places = [name for name, module in lists.items() if len(module) == number]
            if len(places) != 1:
                raise ValueError(
                    f"{len(places)} lists of the module have model.num_layers={number} modules "
                    f"({', '.join(f'{name}: {len(module)}' for name, module in lists.items())}); "
                    "the table can say which one it is: 'layers': 'blocks'"
                )
            place = places[0]
        if place not in lists or len(lists[place]) != number:
            length = f"{len(lists[place])} blocks" if place in lists else "no list of blocks"
            raise ValueError(f"the module has {length} at {place!r}, and model.num_layers is {number}")
        return [f"{place}.{index}" for index in range(number)]

    def _check_places(self) -> None:
        """Raise `ValueError` if the table has a part that no block has, or its parts do not go together."""
        modules, parameters, numbers = dict[str, None](), set[str](), set[str]()
        for place in self.blocks:
            block = self.module.get_submodule(place)
            inside = {name: module for name, module in block.named_modules() if name}
            for name, module in inside.items():
                if self.parts.role(name).kind in LINEAR:
                    check_linear(f"{place}.{name}", module, self.parts.role(name).kind)
            modules |= dict.fromkeys(inside)
            parameters |= {name for name, _ in block.named_parameters()}
            for prefix, module in inside.items():
                numbers |= {f"{prefix}.{name}" for name, value in vars(module).items() if type(value) is int}
        if self.source is None:  # the plan of a class is of all its variants, with and without experts
            self.parts.check_planned_sums(modules, parameters)
        else:
            self.parts.check_places(modules, parameters, numbers)
        self.parts.check_regions(modules, parameters)

    def _find_end(self, kind: str, expected: Any, getter: str) -> str:
        """Return the place of the embedding or the head: by the table, by transformers, or the only one
        with a row for each token.
        """
        rows, place = self.config.model.vocab_size, self.parts.end(kind)
        modules = dict(self.module.named_modules())
        in_blocks = f"{self.blocks[0].rpartition('.')[0]}."
        candidates: dict[str, Any] = {
            name: module
            for name, module in modules.items()
            if isinstance(module, expected) and module.weight.shape[0] == rows
            if not name.startswith(in_blocks)
        }
        if place is None and hasattr(self.module, getter):
            end = getattr(self.module, getter)()
            place = next(name for name, module in modules.items() if module is end)
        if place is None and len(candidates) == 1:
            place = next(iter(candidates))
        if place not in candidates:
            wrong = f"{place!r} is" if place else f"{len(candidates)} modules are"
            raise ValueError(
                f"{wrong} not the one {expected.__name__} with model.vocab_size={rows} rows that is the "
                f"{kind}; the table can say which is: 'lm_head': '{kind}'"
            )
        module = candidates[place]
        if kind == "head":
            check_linear(place, module, kind)
        elif "weight" not in module._parameters:
            raise ValueError(f"{place}.weight is computed from other parameters, and each rank has some rows")
        if kind == "embedding" and (module.max_norm or module.scale_grad_by_freq or module.sparse):
            raise ValueError(f"{place} has max_norm, scale_grad_by_freq or sparse, which are not computed")
        return place

    def _find_tied(self) -> bool:
        """Return whether embedding and head are tied. Raises `ValueError` for other parameters that are."""
        first: dict[int, str] = {}
        ends = {f"{self.embedding}.weight", f"{self.head}.weight"}
        tied = False
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            other = first.setdefault(id(parameter), name)
            if {name, other} == ends:
                tied = True
            elif other != name:
                raise ValueError(f"{name} is {other}: only embedding and head can be one parameter")
        if tied != self.config.model.tie_embeddings:
            raise ValueError(
                f"{self.head}.weight and {self.embedding}.weight are {'one' if tied else 'two'}, and "
                f"model.tie_embeddings is {str(not tied).lower()}"
            )
        return tied

    def _find_outer(self, prefix: str, module: nn.Module) -> Iterator[str]:
        """Yield the places of the largest modules with parameters that hold no block, embedding or head."""
        special = (*self.blocks, self.embedding, self.head)
        if module._parameters and any(parameter is not None for parameter in module._parameters.values()):
            name = f"{prefix}.{next(iter(module._parameters))}".removeprefix(".")
            raise ValueError(
                f"{name} is a parameter outside of blocks: give it a module, which has a forward"
            )
        for name, child in module.named_children():
            place = f"{prefix}.{name}".removeprefix(".")
            if place in special:
                continue
            if any(inner.startswith(f"{place}.") for inner in special):
                yield from self._find_outer(place, child)
            elif next(child.parameters(), None) is not None:
                yield place

    @cached_property
    def first_weights(self) -> "FirstWeights":
        """The weights that training starts from."""
        return FirstWeights(self)


class _Key:
    """A config, as far as it decides what a module is."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.text = json.dumps(
            [
                config.model.model_dump_json(),
                config.train.seq_len,
                config.train.precision,
                config.checkpoint.weights,
            ]
        )

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.text == self.text


@lru_cache(maxsize=4)
def _plain_model(key: _Key) -> PlainModel:
    return PlainModel(key.config)


def to_meta(module: nn.Module) -> None:
    """Replace the parameters of a module by parameters without memory; tied ones stay tied."""
    replaced: dict[int, nn.Parameter] = {}
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                without = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                inner._parameters[name] = replaced.setdefault(id(parameter), without)


def make_buffers(model: Any, module: nn.Module) -> None:
    """Give what is constant in a module memory on the CPU, with the numbers that its class gives it.

    Raises `ValueError` if the class does not say them.
    """
    if not module._buffers:
        return
    for name, buffer in module._buffers.items():
        if buffer is not None:
            if buffer.dtype == torch.bool:
                raise ValueError(f"{type(module).__name__} has its own mask, {name}")
            module._buffers[name] = torch.full(buffer.shape, unset(buffer), dtype=buffer.dtype, device="cpu")
    model._init_weights(module)
    check_set(type(module).__name__, dict(module.named_buffers(recurse=False)))


def unset(tensor: Tensor) -> float:
    """Return the number that marks an element as not set."""
    return float("nan") if tensor.is_floating_point() else -(2**31)


def check_set(where: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` if a number of a tensor was never set."""
    for name, tensor in tensors.items():
        if (tensor.isnan() if tensor.is_floating_point() else tensor == unset(tensor)).any():
            raise ValueError(f"{where} gives its {name} no numbers in `_init_weights`")


def check_linear(place: str, module: nn.Module, kind: str) -> None:
    """Raise `ValueError` if a part of a linear module would not compute what the module's own code does."""
    if type(module) is not nn.Linear and type(module).__name__ != "Conv1D":
        raise ValueError(f"{place} is a {type(module).__name__}, and a {kind} is a torch.nn.Linear itself")
    if set(module._parameters) != {"weight", "bias"} or module._forward_hooks or module._forward_pre_hooks:
        raise ValueError(
            f"{place} has hooks, as weight_norm adds them; a {kind} is a torch.nn.Linear with a weight and a "
            "bias alone"
        )


def check_dropout(module: nn.Module) -> None:
    """Raise `ValueError` if a module drops out."""
    for name, inner in module.named_modules():
        if isinstance(inner, nn.modules.dropout._DropoutNd) and inner.p > 0:
            raise ValueError(f"{name} drops out {inner.p:g}: only 0 is the same in every layout")


def check_attention(model_class: Any) -> None:
    """Raise `ValueError` if a class of transformers attends by code of its own.

    Its code expects a causal mask, which transformers makes for its own implementations of attention alone.
    """
    if not model_class._can_set_attn_implementation():
        raise ValueError(
            f"the attention of {model_class.__name__} is its own code, which would see later tokens and "
            "cannot be replaced"
        )


class FirstWeights:
    """The first weights of a module: those that its own code draws, or those of `checkpoint.weights`.

    They are drawn whole, by the seed and the part's place alone, and so are the same in every layout. A part
    is a block, or a module outside of the blocks; a file's module is drawn in one.
    """

    def __init__(self, model: PlainModel) -> None:
        self.model = model
        self.drawn: tuple[tuple[str, int], Mapping[str, Tensor]] | None = None  # the last part

    def of(self, place: str, name: str, seed: int) -> Tensor:
        """Return the whole parameter `name` of the part at `place`."""
        weights = self.model.config.checkpoint.weights
        if weights is not None and folder.holds_weights(weights):
            return self._kept(("", 0), lambda: read_weights(self.model, weights))[f"{place}.{name}"]
        if not self.model.is_transformers:
            return self._kept(("", seed), lambda: self._draw_module(seed))[f"{place}.{name}"]
        return self._kept((place, seed), lambda: self._draw_part(place, seed))[name]

    def release(self) -> None:
        """Forget what was drawn."""
        self.drawn = None

    def _kept(self, key: tuple[str, int], draw: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        if self.drawn is None or self.drawn[0] != key:
            self.drawn = key, draw()
        return self.drawn[1]

    def _draw_module(self, seed: int) -> Mapping[str, Tensor]:
        with seeded(seed):
            return dict(module_of(self.model.config, NAME).named_parameters(remove_duplicate=False))

    def _draw_part(self, place: str, seed: int) -> Mapping[str, Tensor]:
        part = self.model.part(place)
        for inner in part.modules():
            for name, parameter in inner._parameters.items():
                if parameter is not None:
                    numbers = torch.full(parameter.shape, float("nan"), device="cpu")
                    inner._parameters[name] = nn.Parameter(numbers)
        with seeded(seed, place):
            part.apply(self.model.module._init_weights)  # type: ignore[arg-type]
        parameters = dict(part.named_parameters())
        check_set(place, parameters)
        return parameters


@contextmanager
def seeded(*key: object) -> Iterator[None]:
    """A context in which torch draws numbers that follow from a key."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key_of(*key) % 2**63)
        yield


def read_weights(model: PlainModel, path: str) -> Mapping[str, Tensor]:
    """Read the weights of a transformers folder, by their names in the module."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    names = dict(model.module.named_parameters())
    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys() if name in names}  # noqa: SIM118
    if any(name not in tensors or tensors[name].shape != p.shape for name, p in names.items()):
        # Their names are not those of the module: transformers knows how they correspond.
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        tensors = dict(loaded.named_parameters(remove_duplicate=False))
    return tensors
