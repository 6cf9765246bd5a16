"""What a run reads, opened and checked before any rank waits for another."""

from pathlib import Path

from megacore import checkpoint
from megacore.checkpoint.weights import check_weights
from megacore.config import Config
from megacore.data.indexed import Sidecar
from megacore.data.samples import EvalSamples, training_stream
from megacore.errors import CheckpointError, ConfigError


class Inputs:
    """The corpora, and on rank 0 the checkpoint to go on from (`checkpoint`) or the one whose weights to start from (`weights`).

    Raises `UserError` for whatever is wrong with them.
    """

    def __init__(self, config: Config, rank: int) -> None:
        train, vocab_size = config.train, config.model.vocab_size
        self.stream = training_stream(config)
        self.validation = None if config.data.valid is None else EvalSamples(config.data.valid, train.seq_len, vocab_size)
        self.checkpoint = self._checkpoint(config, rank)
        self.weights = self._weights(config) if rank == 0 and self.checkpoint is None else None
        if rank == 0:
            assert config.log.dir is not None
            check_writable(Path(config.log.dir))

    def _checkpoint(self, config: Config, rank: int) -> Path | None:
        resume = config.checkpoint.resume
        assert config.log.dir is not None
        if resume == "never" or rank != 0:
            return None
        path = checkpoint.find_latest(Path(config.log.dir)) if resume == "auto" else checkpoint.locate(Path(resume))
        if path is None:
            return None
        reader = checkpoint.Reader(path)
        if "engine" not in reader.state:
            wrong = "holds weights alone, without a run to go on with"
            raise CheckpointError(str(path), wrong, f"checkpoint.weights={path}, with a log.dir of its own")
        reader.check_model(config.model.model_dump(), "another log.dir, or checkpoint.resume=never")
        self._check_samples(config, reader)
        if reader.step > config.train.steps:
            wrong = f"is of step {reader.step}, beyond train.steps {config.train.steps}"
            raise CheckpointError(str(path), wrong, "more steps, or checkpoint.resume=never")
        return path

    def _weights(self, config: Config) -> Path | None:
        if config.checkpoint.weights is None:
            return None
        path = checkpoint.locate(Path(config.checkpoint.weights))
        check_weights(checkpoint.Reader(path), config)
        return path

    def _check_samples(self, config: Config, reader: checkpoint.Reader) -> None:
        """A run goes on with sample ``step × global_batch_size`` of its order: what decides the order must not have changed."""
        before = reader.state["config"]
        now = config.model_dump(mode="json", by_alias=True)
        keys = [("train", "seed"), ("train", "global_batch_size"), ("train", "seq_len")]
        if config.checkpoint.resume == "auto":  # an explicit path may well go on with another corpus
            keys.append(("data", "train"))
        for section, key in keys:
            if before[section][key] != now[section][key]:
                change = f"{section}.{key} {before[section][key]}, not {now[section][key]}"
                wrong = f"was saved with {change}: samples would repeat or be skipped"
                raise CheckpointError(str(reader.path), wrong, "the same value, or checkpoint.resume=never")

    def unigram_entropy(self) -> float | None:
        """What the validation set costs, in nats a token, a model that knows token frequencies alone; None if unknown."""
        if self.validation is None:
            return None
        sidecars = [Sidecar.load(tokens.prefix) for tokens in self.validation.corpora]
        known = [s for s in sidecars if s is not None]
        if len(known) < len(sidecars):
            return None
        return sum(s.unigram_entropy * s.tokens for s in known) / sum(s.tokens for s in known)


def check_writable(directory: Path) -> None:
    """Raises `ConfigError` unless the run's folder can be made and written in."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "metrics.jsonl").open("a").close()
    except OSError as error:
        raise ConfigError("log.dir", f"cannot write in {directory}: {error.strerror}", "a folder that can be made and written") from None
