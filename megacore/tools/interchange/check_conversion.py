"""Checks a conversion: the tensors must be the same, and the peer's own code must give the same logits."""

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint import Reader
from megacore.config import Config
from megacore.distributed.buffers import buffers_of
from megacore.errors import CheckpointError, ConfigError
from megacore.model.layers import DTYPES
from megacore.model.stage import whole_model
from megacore.tools.checkpoint_weights import load_weights
from megacore.tools.interchange.folder import Folder
from megacore.tools.planner.parameters import parameters

ROWS, LONGEST = 2, 64  # random tokens that both models read
FP64_PARAMETERS = 200_000_000  # up to here both run in fp64, in 1.6 GB each

# Of the largest logit. Peers compute rotary angles and norm statistics in fp32 even where the model is fp64:
# some 1e-7; wholly in fp32 the products round too. Small mistakes of a mapping are larger: a norm's epsilon
# of 1e-6 for 1e-5, or one form of gelu for the other, makes 1e-4 to 1e-3.
TOLERANCE = {"fp64": 1e-5, "fp32": 5e-5}


def transformers_if_installed() -> ModuleType | None:
    """Imports transformers, without its warnings and progress bars. None if it is not installed."""
    try:
        import transformers
    except ImportError:
        return None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def check_layers(layers: int | None, config: Config) -> None:
    """Raises `ConfigError` unless `layers`, the first blocks to compare, are some of
    the model's (None: all).
    """
    if layers is not None and not 1 <= layers <= config.model.num_layers:
        raise ConfigError(
            "--compare-layers", f"{layers} is not usable", f"from 1 to the model's {config.model.num_layers}"
        )


def require_same(where: Path, name: str, converted: Tensor, read_back: Tensor) -> None:
    """Raises `CheckpointError` unless the two agree in dtype, shape and every bit (NaNs
    and signs of zero among them).
    """
    if converted.dtype == read_back.dtype and converted.shape == read_back.shape:
        one, other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (converted, read_back))
        if torch.equal(one, other):
            return
    wrong = f"tensor {name}, read back, is not what was converted"
    raise CheckpointError(str(where), wrong, "nothing was kept; the mapping or the disk is at fault")


def compare_logits(
    transformers: ModuleType,
    config: Config,
    reader: Reader,
    stored: torch.dtype,
    folder: Path,
    layers: int | None,
) -> str:
    """Compares our model, with `reader`'s weights rounded to `stored`, with the model that
    transformers opens from `folder`.

    Both read the same few random tokens on the CPU, one model after the other; with `layers` only that many
    first blocks of each.

    Returns:
        The finding, for the user.

    Raises:
        CheckpointError: the logits differ by more than `TOLERANCE`, or transformers cannot open the folder.
    """
    whole = config.model.num_layers
    config, rows = sample_of(config, layers)
    precision = config.train.precision
    ours = own_logits(config, reader, stored, rows)
    theirs, architecture = peer_logits(transformers, folder, config.model.num_layers, DTYPES[precision], rows)
    if ours.shape != theirs.shape:
        raise CheckpointError(
            str(folder),
            f"logits are {tuple(theirs.shape)} of transformers, {tuple(ours.shape)} here",
            "the same",
        )
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    most = TOLERANCE[precision]
    finding = f"{compared(rows, layers, whole, precision)}, differ from {architecture}'s"
    if not difference <= most:  # nor NaN
        raise CheckpointError(
            str(folder),
            f"{finding} by {difference:.1e} of the largest",
            f"at most {most:g}; nothing was kept",
        )
    return f"{finding} by {difference:.1e} of the largest (at most {most:g})"


def sample_of(config: Config, layers: int | None, precision: str | None = None) -> tuple[Config, Tensor]:
    """A model to compare, of the first `layers` blocks or all, in fp64 if it is small; and random
    tokens ``[batch, seq]`` for it.
    """
    model = config.model.model_copy(
        update={"num_layers": layers or config.model.num_layers, "attention": "sdpa"}
    )
    config = config.model_copy(update={"model": model})
    precision = precision or ("fp64" if parameters(config) <= FP64_PARAMETERS else "fp32")
    rows = torch.randint(
        model.vocab_size,
        (ROWS, min(LONGEST, config.max_positions)),
        generator=torch.Generator().manual_seed(0),
    )
    update = {"precision": precision, "seq_len": rows.shape[1], "compile": False, "recompute": "none"}
    return config.model_copy(update={"train": config.train.model_copy(update=update)}), rows


def compared(rows: Tensor, layers: int | None, whole: int, precision: str) -> str:
    """What is compared, for the user."""
    blocks = f"the first {layers} of {whole}" if layers else f"all {whole}"
    return (
        f"logits of {rows.shape[0]} × {rows.shape[1]} random tokens through {blocks} blocks, in {precision}"
    )


@torch.no_grad()
def own_logits(config: Config, reader: Reader, stored: torch.dtype | None, rows: Tensor) -> Tensor:
    """Computes our model's logits ``[batch, seq, vocab]``, with weights rounded
    to `stored` (None: as they are).
    """
    stage = whole_model(config, "meta").eval()
    stage.compute_on(torch.device("cpu"))
    load_weights(reader, [stage])
    for parameter in stage.parameters():
        parameter.copy_(parameter.to(stored or parameter.dtype))
    for buffer in buffers_of([stage]).values() if stored is not None else ():
        buffer.value.copy_(buffer.value.float())  # see `Mapped.theirs`
    return stage.logits(stage.hidden(rows)).view(*rows.shape, -1)


def _in_current_words(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a folder as transformers 5 reads it: the first Phi-3 files call LongRoPE su."""
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("type") != "su":
        return config
    return config | {"rope_scaling": scaling | {"type": "longrope"}}


@torch.no_grad()
def peer_logits(
    transformers: ModuleType, folder: Path, layers: int, dtype: torch.dtype, rows: Tensor
) -> tuple[Tensor, str]:
    """The logits of transformers' model of `folder`, cut to `layers` blocks, and the name of its class."""
    opened = Folder(folder)
    try:
        config_class = type(transformers.AutoConfig.for_model(opened.config.get("model_type")))
        config = config_class.from_dict(_in_current_words(opened.config))
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        with torch.device("meta"):
            model_class = type(transformers.AutoModelForCausalLM.from_config(config))
        model = model_class.from_pretrained(
            folder if opened.transformers_reads_it else None,
            config=config,
            state_dict=None if opened.transformers_reads_it else opened.tensors(),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
        )
    except (OSError, RuntimeError, ValueError, LookupError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            str(folder), f"transformers cannot open it: {reason}", "nothing was kept"
        ) from error
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's product of groups knows no fp64
    return model.eval()(input_ids=rows).logits, type(model).__name__
