"""Opens and checks all that a run reads, before any rank waits for another."""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megacore import checkpoint
from megacore.checkpoint.folder import step_of
from megacore.checkpoint.format import MOST_SAMPLES, RunState
from megacore.checkpoint.weights import WEIGHTS, check_weights, frozen_of, recorded_sections
from megacore.config import Config
from megacore.config.optim import OptimConfig
from megacore.config.optim_groups import KEY, ParameterGroups
from megacore.config.schema import TrainConfig, resolved
from megacore.data.samples import EvalSamples
from megacore.engine.learning_rate import learning_rate
from megacore.errors import CheckpointError, ConfigError
from megacore.files import check_folder
from megacore.model.choose import layers_of
from megacore.model.flow import CROSS_ENTROPY
from megacore.model.layers import losses_of
from megacore.model.plain.folder import holds_weights
from megacore.model.stage import whole_model
from megacore.records import complaint
from megacore.tools.corpora import Sidecar, check_corpora, checked_stream


class Inputs:
    """The corpora, and on rank 0 the checkpoint to resume (`checkpoint`) or the checkpoint whose
    weights to start from (`weights`).

    Raises `UserError` if anything is wrong with them.
    """

    def __init__(self, config: Config, rank: int, scan: bool = True) -> None:
        """`scan`: reads the corpora for tokens beyond the vocabulary. One rank of a machine is enough."""
        train, vocab_size = config.train, config.model.vocab_size
        if config.model.is_custom:
            whole_model(config, "meta")  # raises, if the file's blocks cannot be made
        if rank == 0:
            tokenizer = config.data.tokenizer  # training does not need it, but generating text later does
            if tokenizer not in (None, "bytes") and not Path(tokenizer).is_file():
                right = (
                    "launch/prepare.py makes one with a corpus; or bytes, a sentencepiece .model, a "
                    "tokenizer.json, or null"
                )
                raise ConfigError("data.tokenizer", f"there is no file {tokenizer}", right)
        self.stream = checked_stream(config, scan)
        valid, packing = config.data.valid, config.data.packing
        self.validation = None if valid is None else EvalSamples(valid, train.seq_len, vocab_size, packing)
        if self.validation is not None:
            check_corpora(self.validation.corpora, vocab_size, scan)
            check_measurable(config)
        self.config = config
        self.candidates: list[Path] = []  # checkpoints before `checkpoint`
        # the one that is named; opened once, since a large one takes seconds
        self.opened: checkpoint.Reader | None = None
        self.checkpoint = self._checkpoint() if rank == 0 else None
        self.weights = self._weights(config) if rank == 0 and self.checkpoint is None else None
        if rank == 0:
            check_folder("log.dir", resolved(config.log.dir))

    @property
    def unread_weights(self) -> str | None:
        """A line for the console, if the folder of `model.hf` has weights that the run does not read."""
        hf = self.config.model.hf
        if hf is None or self.checkpoint is not None or self.config.checkpoint.weights is not None:
            return None
        right = f"checkpoint.weights={hf} reads them"
        return f"model.hf: the weights in {hf} are not read: {right}" if holds_weights(hf) else None

    def _checkpoint(self) -> Path | None:
        resume, log_dir = self.config.checkpoint.resume, resolved(self.config.log.dir)
        if resume == "never":
            return None
        path = Path(log_dir if resume == "auto" else resume)
        self.candidates = checkpoint.checkpoints_in(path)
        if resume == "auto" and (mirror := self.config.checkpoint.mirror) is not None:
            copies = [copy for copy in checkpoint.checkpoints_in(Path(mirror)) if copy.suffix != ".old"]
            # of one step, the run's own first
            self.candidates = sorted([*self.candidates, *copies], key=step_of, reverse=True)
        if resume == "auto" and not self.candidates:
            return None
        if not self.candidates:
            checkpoint.locate(path)  # raises, saying what was looked for
        return self._newest(None)

    def look_again(self, resumed: Path | None, step: int) -> None:
        """On rank 0 during the run, sets `checkpoint` to the newest that the run has saved, or
        else to the one that it `resumed`.
        """
        folder = Path(resolved(self.config.log.dir))
        self.candidates = checkpoint.checkpoints_in(folder)
        # older ones in the folder are then of another run
        if resumed is not None and resumed not in self.candidates:
            newer = [path for path in self.candidates if step_of(path) > step]
            self.candidates = [*newer, resumed]
        if not self.candidates:
            checkpoint.locate(folder)  # raises: somebody has deleted them
        self.checkpoint = self._newest(None)

    def fall_back(self, damage: CheckpointError) -> None:
        """On rank 0, goes on to the checkpoint before `checkpoint`, which was found
        to be damaged when it was read.

        Raises:
            CheckpointError: it is the one that was asked for by its path, or there is none before it.
        """
        if self.checkpoint is not None:
            if self.checkpoint == Path(self.config.checkpoint.resume):
                raise damage
            if self.candidates:
                checkpoint.warn_of_damage(damage, self.candidates[0])
            self.checkpoint = self._newest(damage)

    def _newest(self, damage: CheckpointError | None) -> Path:
        """The next of the candidates that is whole by its manifest and the sizes of its files.

        All ranks compare the rest together.

        Raises:
            CheckpointError: none is, or the one that was asked for by its path is not.
        """
        self.opened, faults = checkpoint.newest_whole(self.candidates, headers=False)
        if self.opened is not None:
            self._check_run(self.opened)
            return self.opened.path
        damage = damage or faults[0]
        if Path(damage.where) == Path(self.config.checkpoint.resume):
            raise damage
        wrong = f"{damage.wrong}, and no checkpoint before it is whole"
        raise CheckpointError(
            damage.where, wrong, "bring back a whole one, or start from nothing with checkpoint.resume=never"
        )

    def _check_run(self, reader: checkpoint.Reader) -> None:
        """Refuses a checkpoint that this run cannot resume."""
        if "engine" not in reader.state:
            wrong = "holds weights alone, without a run to resume"
            raise CheckpointError(
                str(reader.path), wrong, f"checkpoint.weights={reader.path}, with a log.dir of its own"
            )
        reader.check_model(
            self.config.model.model_dump(mode="json"), "another log.dir, or checkpoint.resume=never"
        )
        self._check_state(reader)
        self._check_samples(self.config, reader)
        self._check_counts(reader)
        steps = self.config.train.steps
        if reader.step > steps:
            wrong = f"is of step {reader.step}, beyond train.steps {steps}"
            raise CheckpointError(str(reader.path), wrong, "more steps, or checkpoint.resume=never")
        if self.config.optim.schedule == "wsd" and self.config.checkpoint.resume != "auto":
            self._check_decay(reader)

    def _check_decay(self, reader: checkpoint.Reader) -> None:
        """Refuses a decay from a checkpoint named by its path whose rate would jump there: it decays
        already, or this decay has begun.
        """
        optim, steps, recorded, at = (
            self.config.optim,
            self.config.train.steps,
            recorded_sections(reader),
            reader.step,
        )
        try:
            before = OptimConfig.model_validate_json(json.dumps(recorded.get("optim")))
            was = learning_rate(before, at, recorded["train"]["steps"]) / before.lr
        except (ValidationError, ArithmeticError, AssertionError, LookupError, TypeError):
            return  # a recorded section that cannot be read, or without a rate
        decay_steps, now = resolved(optim.decay_steps), learning_rate(optim, at, steps) / (optim.lr or 1.0)
        if was < now * (1 - 1e-9):
            wrong = f"is in its decay already, at {was:.3g} of optim.lr"
            raise CheckpointError(
                str(reader.path), wrong, "an earlier checkpoint, of a step with the whole rate"
            )
        if now < was * (1 - 1e-9):
            wrong = f"{decay_steps} steps up to train.steps {steps} begin before step {at} of the checkpoint"
            right = f"at most {steps - at}, or train.steps={at + decay_steps}"
            raise ConfigError("optim.decay_steps", wrong, right)

    def _check_state(self, reader: checkpoint.Reader) -> None:
        """Refuses a checkpoint without the state of a parameter's optimizer, or with another's,
        which may give it another meaning.
        """
        groups, names, before = (
            ParameterGroups(self.config.optim),
            set(reader.names),
            recorded_sections(reader).get("optim"),
        )
        frozen = frozen_of(self.config)
        for name in reader.names:
            kind, _, parameter = name.partition("/")
            if f"{kind}/" != WEIGHTS or parameter in frozen:
                continue
            group = groups.of(parameter)
            state = group.kinds
            by = f"{KEY}[{group.number - 1}]" if group.number else f"optim.kind={group.rule.name}"
            right = (
                "the optimizer that it was saved with, or its weights alone: "
                f"checkpoint.weights={reader.path}"
            )
            if lacking := [kind for kind in state if f"{kind}/{parameter}" not in names]:
                saved = [kind for kind in lacking if any(name.startswith(f"{kind}/") for name in names)]
                of = f" of {parameter}" if saved else ""
                wrong = f"holds no {' and no '.join(lacking)}{of}, which {by} needs to resume"
                raise CheckpointError(str(reader.path), wrong, right)
            if state and (was := recorded_rule(before, parameter)) not in (None, group.rule.name):
                wrong = (
                    f"holds {' and '.join(state)} of {parameter} as {was} left it, and {by} means "
                    "something else by that"
                )
                raise CheckpointError(str(reader.path), wrong, right)

    def _check_counts(self, reader: checkpoint.Reader) -> None:
        """Refuses a state that is none, and counts that training cannot have
        reached by the checkpoint's step.
        """
        step, train, right = reader.step, self.config.train, "use an earlier checkpoint"
        try:
            state = RunState.model_validate(reader.state)
        except ValidationError as error:
            raise CheckpointError(
                str(reader.path), f"its state is damaged: {complaint(error)}", right
            ) from None
        for name in ("updates", "skipped", "good_steps"):
            if (count := getattr(state.engine, name)) > step:
                raise CheckpointError(
                    str(reader.path),
                    f"engine.{name} in its state is {count:g}, beyond its step {step}",
                    right,
                )
        least, whole = train.samples_through(step), train.samples_through(train.batches_in(state.samples))
        if (
            whole != state.samples
            or not least <= state.samples <= MOST_SAMPLES - train.steps * train.global_batch_size
        ):
            by = (
                "in batches of train.batch_ramp"
                if train.batch_ramp
                else f"× train.global_batch_size {train.global_batch_size}"
            )
            wrong = f"samples in its state is {state.samples}, and its step {step} {by} = {least}"
            raise CheckpointError(str(reader.path), wrong, f"as many, or more by whole batches; {right}")

    def _weights(self, config: Config) -> Path | None:
        if config.checkpoint.weights is None or holds_weights(config.checkpoint.weights):
            return None  # a folder of transformers is read where weights are drawn
        path = checkpoint.locate(Path(config.checkpoint.weights))
        self.opened = checkpoint.Reader(path)
        check_weights(self.opened, config)
        return path

    def _check_samples(self, config: Config, reader: checkpoint.Reader) -> None:
        """Refuses changed settings that decide the order of samples: the run continues that order
        at ``step × global_batch_size``.
        """
        before = recorded_sections(reader)
        now = config.model_dump(mode="json", by_alias=True)
        keys = [("train", "seed"), ("train", "seq_len"), ("data", "packing")]
        keys += same_batches(before["train"], config.train, reader.step)
        # a checkpoint named by its path may continue with another corpus
        if config.checkpoint.resume == "auto":
            keys.append(("data", "train"))
        for section, key in keys:
            recorded = before[section].get(key)
            if recorded != now[section][key]:
                change = f"{section}.{key} {recorded}, not {now[section][key]}"
                wrong = f"was saved with {change}: samples would repeat or be skipped"
                raise CheckpointError(str(reader.path), wrong, "the same value, or checkpoint.resume=never")

    def unigram_entropy(self) -> float | None:
        """The loss on the validation set, in nats a token, of a model that knows only
        token frequencies; None if unknown.
        """
        if self.validation is None:
            return None
        sidecars = [Sidecar.load(tokens.prefix) for tokens in self.validation.corpora]
        known = [s for s in sidecars if s is not None]
        if len(known) < len(sidecars):
            return None
        return sum(s.unigram_entropy * (s.learned or s.tokens) for s in known) / sum(
            s.learned or s.tokens for s in known
        )


def same_batches(recorded: dict[str, Any], train: TrainConfig, step: int) -> list[tuple[str, str]]:
    """The keys to compare of those that decide the sizes of batches: none, if a ramp
    changes only those behind `step`.
    """
    keys = ("global_batch_size", "batch_ramp")
    try:
        before = TrainConfig.model_validate_json(
            json.dumps({key: recorded[key] for key in keys if key in recorded})
        )
    except ValidationError:
        return [("train", key) for key in keys]
    ends = {min(last, step) for last, _ in (*before.batch_ramp, *train.batch_ramp)} | {step}
    alike = all(before.samples_through(end) == train.samples_through(end) for end in ends)
    return [] if alike and (before.batch_ramp or train.batch_ramp) else [("train", key) for key in keys]


def recorded_rule(optim: Any, parameter: str) -> Any:
    """The name of the rule that updated a parameter, by a recorded section `optim`, which may be any
    JSON; None where it does not say.
    """
    if not isinstance(optim, dict):
        return None
    groups = optim.get("groups")
    for entry in groups if isinstance(groups, list) else []:
        match = entry.get("match") if isinstance(entry, dict) else None
        if isinstance(match, list) and any(fnmatchcase(parameter, str(pattern)) for pattern in match):
            return entry.get("kind", optim.get("kind"))
    return optim.get("kind")


def check_measurable(config: Config) -> None:
    """Raises `ConfigError` if the model has no loss that validation measures: a file of the
    user's own may give others alone.
    """
    if CROSS_ENTROPY.name not in (names := losses_of(layers_of(config))):
        wrong = f"validation measures {CROSS_ENTROPY.name}, and the model has {', '.join(names) or 'no loss'}"
        raise ConfigError("data.valid", wrong, f"null, or a layer with a loss called {CROSS_ENTROPY.name}")
