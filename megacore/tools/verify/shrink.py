"""Makes a config small enough to prove on two cores.

It keeps all that could break: ratios, remainders, ties, features, splits.
"""

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from megacore.config import Config
from megacore.config.engine import Compression
from megacore.config.model import LongRope
from megacore.config.optim import OptimGroup
from megacore.config.schema import MASK, resolved
from megacore.config.source import SMALL, UNTOUCHED, source_of
from megacore.data.indexed import IndexedTokens
from megacore.errors import ConfigError
from megacore.model.plain.folder import FILE, SIZES, transformers_config
from megacore.pipeline.partition import stage_layers
from megacore.tools.choices.flops import head_cost, layer_cost
from megacore.tools.choices.partition import partitioned
from megacore.tools.corpora import checked_stream
from megacore.tools.prepare.indexed_writer import IndexedWriter
from megacore.tools.settings.ds_settings import read as read_ds_config
from megacore.tools.settings.from_ds_config import without_stated
from megacore.tools.settings.load import flatten, load, resolve, set_value
from megacore.tools.verify.layouts import Layout

HEAD_SIZE = 4
# for heads with a norm: few features may all be nearly zero, and the norm then magnifies their rounding
NORMED_HEAD_SIZE = 8
SEQ_LEN = 16
EXPERTS, FEATURES = 8, 6  # of a mixture, and of each expert
LAYERS = 4  # if the model has as many: blocks may differ by their index
LAYERS_A_STAGE = 4  # the most that are tried to find a split like the user's
MICROBATCHES = 8  # of the global batch, if the user has as many: a pipeline of four stages fills and empties
CHUNK = 128  # tokens in the shortest chunk of a chunked loss on a CPU, see kernels/linear_cross_entropy.py
DRAWS = 200  # corpora that are tried, until documents are cut where it shows; in small batches some have none
BLEND = {"train": 0.6, "more": 0.4}  # corpora for training, with their shares of the samples
# of which one is wrong if a model does not say which
MAIN_SIZES = ("model.num_layers", "model.hidden_size", "model.num_heads", "model.vocab_size", "train.seq_len")
OFTEN = {"train": 4, "more": 10, "valid": 4}  # documents that begin in a sample's length
# large enough that fp32 resolves a step's weight decay, small enough that bf16's errors do not grow in three
# steps
RATE = 1e-3
DECAY = 0.1


def load_whole(path: str, overrides: list[str]) -> Config:
    """The user's config, resolved for one process. Raises `ConfigError` if it is wrong."""
    alone = [
        *Layout("one").overrides(),
        "parallel.context=1",
        "parallel.expert=1",
        "parallel.expert_tensor=null",
    ]
    return load(path, [*overrides, *alone, "parallel.backend=auto", "train.device=cpu"]).config


def shrink(user: Config, layouts: list[Layout], steps: int, precision: str) -> dict[str, dict[str, Any]]:
    """The small config's sections, with only the values that differ from the defaults.

    `layouts` are those that the user's config allows. It keeps every kind and flag of the model, the grouping
    of heads, whether sizes divide by the tensor ranks, which stages have more layers than others, whether
    there are fewer microbatches than stages, an odd micro batch, several chunks of a chunked loss, ties,
    biases, dropout, schedule, recomputation, and the optimizer's settings. It changes sizes, the learning
    rate and weight decay, and whatever would hide a difference: clipping is always active, the learning rate
    has no warmup, and weights are so large that activations have the user's size.
    """
    # A size that every layout's tensor ranks divide.
    tensor = math.lcm(*(layout.size("tensor") for layout in layouts))
    (micro_batch, seq_len), count = tokens_of(user, layouts), microbatches(user, layouts)
    small: dict[str, dict[str, Any]] = {
        "model": sizes(user, tensor, seq_len, precision) | experts(user, layouts) | latents(user),
        "train": {
            "steps": steps,
            "seq_len": seq_len,
            "micro_batch_size": micro_batch,
            "global_batch_size": micro_batch * count,
            "batch_ramp": [[1, micro_batch * unit_of(layouts)]]
            if user.train.batch_ramp and unit_of(layouts) < count
            else [],
            "precision": precision,
            "device": "cpu",
            "compile": False,
            "eval_every": 0,
            "eval_batches": 0,
        },
        "optim": {
            "warmup_steps": 0,
            "lr": RATE,
            "min_lr": RATE * user.optim.min_lr / (user.optim.lr or 1.0),
            "decay_steps": steps - 1 if user.optim.schedule == "wsd" else 2 * steps,
            "grad_clip": 0.1 if user.optim.grad_clip else 0.0,
            "weight_decay": DECAY if user.optim.weight_decay else 0.0,
            "groups": [smaller_rate(entry, user.optim.lr) for entry in user.optim.groups],
        },
        "data": {"train": None, "valid": None, "tokenizer": None},
        "checkpoint": {"every": 0, "last": False, "resume": "never", "weights": None},
        "engine": {
            "bucket_mib": 0.01,  # several buckets, so that their order matters
            "reduce_dtype": "fp32" if precision == "fp64" else user.engine.reduce_dtype,
            "compression": without_loss(user.engine.compression) if precision == "fp64" else None,
        },
        "parallel": {
            "timeout_seconds": 60.0,
            "tensor": 1,
            "pipeline": 1,
            "data": "auto",
            "sequence": False,
            "backend": "auto",
        }
        | {"expert": 1, "expert_tensor": None},
        "log": {"dir": None, "every": 1, "tensorboard": False, "wandb": "off", "prometheus_port": None},
    }
    if user.model.hf is not None:
        small["model"] |= architecture(user, small["model"], seq_len, tensor)
    small["model"] |= depth_and_vocabulary(user, small, layouts, tensor)
    if user.engine.config is not None:  # what it says of the run is said above
        small["engine"]["config"] = without_stated(read_ds_config(user.engine.config))
    return what_differs(user, corrected(user, small))


def corrected(user: Config, small: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The small sections, with the overrides that the model's file gives by its function `small`, if it has
    one.

    `small` is called with the small config, unchecked: a size in it may be one that the model cannot have.
    """
    overrides = file_overrides(user, small)
    sections = {name: dict(values) for name, values in small.items()}
    for key, value in overrides.items():
        set_value(sections, key, value)
    return sections


def file_overrides(user: Config, small: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the function `small` of the model's file returns, by key. Raises `ConfigError` if it is wrong."""
    source = source_of(user)
    if source is None or source.small is None:
        return {}
    sections = {name: getattr(user, name).model_copy(update=values) for name, values in small.items()}
    known = flatten(type(user)().model_dump(by_alias=True))
    with source.blamed(f", {SMALL}"):
        overrides = dict(source.small(user.model_copy(update=sections)))
        for key in overrides:
            if key not in known:
                raise ValueError(f"{key!r} is not a key of the config, such as model.num_layers")
    return overrides


@contextmanager
def explain_sizes(user: Config, sections: dict[str, dict[str, Any]]) -> Iterator[None]:
    """A context in which the small config is used: a `ConfigError` about a size says that verify chose it.

    The user has not written these numbers, so the error must not read as if the file were wrong.
    """
    try:
        yield
    except ConfigError as error:
        # An option is not a size, and an untouched module that does not fit has a message of its own.
        if error.where.startswith("--") or f"{UNTOUCHED}: " in error.wrong:
            raise
        source = source_of(user)
        chosen = chosen_sizes(user, sections, f"{error.where}: {error.wrong}")
        if not chosen:  # the user's own sizes have the same mistake
            raise
        key = next(iter(chosen))
        raise ConfigError(
            key,
            f"verify chose {', '.join(f'{name}={size}' for name, size in chosen.items())} for its small "
            f"model, which does not suit it: {error.wrong}",
            f"a function {SMALL}(config) in {source.path} that gives other sizes, or an override {key}=…"
            if source is not None
            else f"an override {key}=…",
        ) from error


def chosen_sizes(user: Config, sections: dict[str, dict[str, Any]], complaint: str) -> dict[str, int]:
    """Return the sizes in the small config that are not the user's and that a complaint mentions, by key or
    by number.
    """
    users = flatten(user.model_dump(mode="json", by_alias=True))
    small = flatten(type(user)().model_dump(mode="json", by_alias=True)) | flatten(sections)
    changed = {
        key: value for key, value in small.items() if type(value) is int and value != users.get(key, value)
    }
    words = set(re.findall(r"\w+", complaint))
    named = {key: value for key, value in changed.items() if key.partition(".")[2] in words}
    numbers = set(re.findall(r"(?<![\w.])\d+(?![\w.])", complaint))  # not the 2 of blocks.2
    return named or {
        key: value for key, value in changed.items() if key in MAIN_SIZES and str(value) in numbers
    }


def without_loss(compression: Compression | None) -> dict[str, Any] | None:
    """The same, but that it loses nothing."""
    lossless: dict[str, dict[str, Any]] = {
        "int8": {"block": 64, "rounding": "none"},
        "low_rank": {"rank": None},
    }
    return None if compression is None else {"kind": compression.kind, **lossless[compression.kind]}


def smaller_rate(entry: OptimGroup, lr: float) -> dict[str, Any]:
    """An entry of `optim.groups`, with its rate in the same proportion to that of others, which is `lr`."""
    rate = {} if entry.lr is None else {"lr": RATE * entry.lr / (lr or 1.0)}
    return entry.model_dump(mode="json") | rate


def tokens_of(user: Config, layouts: list[Layout]) -> tuple[int, int]:
    """Micro batch size and sequence length, such that context ranks divide a sequence, and
    tensor ranks a microbatch's tokens.
    """
    pieces = math.lcm(*(2 * layout.size("context") for layout in layouts if layout.size("context") > 1))
    train = user.train
    # An odd number stays odd, because then sequences are cut across ranks.
    micro_batch = min(train.micro_batch_size, 2 + train.micro_batch_size % 2)
    seq_len = min(train.seq_len, SEQ_LEN)
    if user.model.chunked_loss and train.micro_batch_size * train.seq_len > CHUNK:
        seq_len = CHUNK // micro_batch + SEQ_LEN // 2  # two chunks, the last of them short
    divided = [layout for layout in layouts if layout.sequence or user.model.num_experts is not None]
    while seq_len % pieces or any(
        micro_batch * seq_len // a.size("context") % a.size("tensor") for a in divided
    ):
        seq_len += 1
    return micro_batch, seq_len


def sizes(user: Config, tensor: int, seq_len: int, precision: str) -> dict[str, Any]:
    """The model's sizes except depth and vocabulary, such that `tensor` ranks divide them."""
    model = user.model
    # Two key/value heads a rank, if there are: with one, a rank's number equals that of its first head and
    # hides mistakes.
    kv_heads = tensor * min(user.kv_heads // tensor, 2)
    may_norm = model.qk_norm or model.hf is not None
    heads = kv_heads * min(model.num_heads // user.kv_heads, 2 if may_norm else 4)
    head_size = min(user.head_size, NORMED_HEAD_SIZE if may_norm else HEAD_SIZE)
    width = model.num_heads * user.head_size
    hidden = (
        heads * head_size
        if model.hidden_size == width
        else max(8, round(model.hidden_size / width * heads * head_size))
    )
    if model.hf is not None:  # many of its classes want a multiple, also where heads have a size of their own
        hidden = -(-hidden // heads) * heads
    ffn = max(tensor, -(-round(resolved(model.ffn_size) / model.hidden_size * hidden) // tensor) * tensor)
    return (
        {
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_size": head_size,
            "hidden_size": hidden,
            "ffn_size": ffn,
            "max_positions": seq_len + (8 if user.max_positions > user.train.seq_len else 0),
            "attention_scale": resolved(model.attention_scale) * (user.head_size / head_size) ** 0.5,
            "init_std": model.init_std * (model.hidden_size / hidden) ** 0.5,
            "attention": "eager" if model.attention == "fused" and precision == "fp64" else model.attention,
            "kernels": "auto" if precision == "fp64" else model.kernels,
        }
        | base_sizes(user, hidden, head_size)
        | kinds_of_blocks(user, seq_len, head_size)
    )


def architecture(user: Config, small: dict[str, Any], seq_len: int, tensor: int) -> dict[str, Any]:
    """What `model.hf` has besides the sizes of section `model`, made small as `experts` and `kinds_of_blocks`
    do, and without the settings that only megacore's own layers have.
    """
    hf = transformers_config(user)
    content = json.loads(hf.to_json_string(use_diff=False))  # with the class's defaults and the user's sizes
    head_size, features = small["head_size"], tensor * -(-FEATURES // tensor)
    most = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), EXPERTS)
    most |= dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), features
    )
    most |= {"num_experts_per_tok": EXPERTS // 2, "first_k_dense_replace": 1, "decoder_sparse_step": 2}
    most |= {"query_pre_attn_scalar": head_size, "rotary_dim": head_size // 2}
    if (content.get("sliding_window") or user.train.seq_len) < user.train.seq_len:
        most["sliding_window"] = seq_len // 3
    for name, size in most.items():
        if isinstance(value := content.get(name), int | float) and value > size:
            content[name] = size

    scales = {
        "initializer_range": user.model.hidden_size / small["hidden_size"],
        "attention_multiplier": user.head_size / head_size,
    }
    for name, ratio in scales.items():
        if content.get(name) is not None:
            content[name] *= ratio**0.5
    rope = content.get("rope_parameters") or {}
    if (share := rope.get("partial_rotary_factor") or 1.0) < 1:
        rope["partial_rotary_factor"] = max(1, round(share * head_size / 2)) * 2 / head_size

    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(content.get(name) or ()))
        if len(kinds) > 1:  # blocks of all kinds are among the first
            content[name] = [kinds[number % len(kinds)] for number in range(user.model.num_layers)]
    return {"hf_config": content, "attention_scale": None, "init_std": user.model.init_std}


def kinds_of_blocks(user: Config, seq_len: int, head_size: int) -> dict[str, Any]:
    """Windows, where the user has them, that end within a sequence; every second block of
    another kind; whole pairs that turn.
    """
    model, small = user.model, dict[str, Any]()
    if model.window is not None and model.window < user.train.seq_len:
        small["window"] = max(1, min(model.window, seq_len // 3))
        small["window_schedule"] = (
            [[1, 1], [2, small["window"] - 1]][: small["window"] - 1] if model.window_schedule else []
        )
    for key in ("global_every", "nope_every"):
        if (every := getattr(model, key)) is not None and every <= model.num_layers:
            small[key] = min(every, 2)
    if model.rotary_share < 1:
        small["rotary_share"] = max(1, round(model.rotary_share * head_size / 2)) * 2 / head_size
    if isinstance(model.rope_scaling, LongRope):  # which has a factor for each pair
        pairs = int(head_size * small.get("rotary_share", 1.0)) // 2
        factors = {
            name: [values[pair * len(values) // pairs] for pair in range(pairs)]
            for name, values in (
                ("short_factor", model.rope_scaling.short_factor),
                ("long_factor", model.rope_scaling.long_factor),
            )
        }
        small["rope_scaling"] = model.rope_scaling.model_dump() | factors
    return small


def experts(user: Config, layouts: list[Layout]) -> dict[str, Any]:
    """Few small experts, which every layout's ranks divide, in as many groups; every second
    block of the other kind, if any is.
    """
    model = user.model
    if model.num_experts is None:
        return {}
    unit = math.lcm(model.expert_groups, *(layout.size("expert") for layout in layouts))
    count = min(model.num_experts, unit * -(-max(EXPERTS, 2 * model.expert_groups) // unit))
    parts = math.lcm(*(layout.sizes.get("expert_tensor", layout.size("tensor")) for layout in layouts))
    if model.shared_experts:
        parts = math.lcm(parts, *(layout.size("tensor") for layout in layouts))
    among = count // model.expert_groups * model.groups_per_token
    return {
        "num_experts": count,
        "experts_per_token": min(model.experts_per_token, max(1, among // 2)),
        "expert_ffn_size": parts * -(-FEATURES // parts),
        "first_dense": min(model.first_dense, 1),
        "experts_every": min(model.experts_every, 2),
    }


def latents(user: Config) -> dict[str, Any]:
    """Small latents, and a head's features of as many sizes."""
    model = user.model
    if model.kv_rank is None:
        return {}
    small = {"kv_rank": 6, "plain_size": 6, "value_size": 5} | (
        {} if model.q_rank is None else {"q_rank": 10}
    )
    return {key: min(getattr(model, key), size) for key, size in small.items()}


def base_sizes(user: Config, hidden: int, head_size: int) -> dict[str, int]:
    """With mup, another base than the model's width, if the user has another; it has as many heads."""
    base, factor = user.model.base_width, 1 if user.model.base_width == user.model.hidden_size else 2
    return {} if base is None else {"base_width": factor * hidden, "base_head_size": factor * head_size}


# Keys that may be null, and that nothing derives.
UNDERIVED = {
    "engine.config",
    "model.source",
    "model.hf",
    "model.hf_revision",
    "model.hf_config",
    "model.base_width",
    "model.base_head_size",
    "model.base_layers",
    "model.window",
}
UNDERIVED |= {"model.num_experts"}


def what_differs(user: Config, small: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The user's sections with `small` over them, with only the values that differ from the defaults."""
    defaults = flatten(type(user)().model_dump(mode="json", by_alias=True))
    values = flatten(user.model_dump(mode="json", by_alias=True)) | flatten(small)
    # Neither defaults nor derived values are written, so that another version of the code can read the config
    # even if it does not know every key.
    written = {key: value for key, value in values.items() if key in defaults and value != defaults[key]}
    kept = set(UNDERIVED)
    if user.model.hf is not None:  # which gives other sizes than the defaults
        sizes = {f"model.{name}" for name in SIZES}
        written |= {key: values[key] for key in sizes}
        kept |= sizes
    for key in [key for key in written if defaults[key] is None and key not in kept]:
        rest = {k: v for k, v in written.items() if k != key}
        with suppress(ConfigError):  # the others need it
            if (
                flatten(
                    resolve(sections_of(rest), [], "verify", 1).config.model_dump(mode="json", by_alias=True)
                )[key]
                == written[key]
            ):
                written = rest
    return sections_of(written)


def unit_of(layouts: list[Layout]) -> int:
    """Microbatches of which every layout's global batch is a multiple."""
    return math.lcm(*(layout.size("data") for layout in layouts))


def microbatches(user: Config, layouts: list[Layout]) -> int:
    """Microbatches of the small global batch: few, and fewer than stages in the
    layouts in which the user has fewer.

    A rank has two if the user has as many, so that accumulation is seen everywhere. More important is that
    all layouts have the same batch, which each must divide.
    """
    users = user.train.global_batch_size // user.train.micro_batch_size
    unit = unit_of(layouts)
    # with a microbatch for each stage of each data rank
    full = [layout.size("data") * layout.size("pipeline") for layout in layouts]
    count = min(
        users, unit * -(-max(MICROBATCHES, 2 * max(layout.size("data") for layout in layouts)) // unit)
    )
    count = max(count, *(size for size in full if size <= users), 1)
    count = -(-count // unit) * unit
    least_full = min((size for size in full if size > users), default=count + 1)
    return count if count < least_full else max(unit, (least_full - 1) // unit * unit)


def depth_and_vocabulary(
    user: Config, small: dict[str, dict[str, Any]], layouts: list[Layout], tensor: int
) -> dict[str, int]:
    """The fewest layers, with the smallest vocabulary, that are split over stages as the user's are.

    The cost of the head relative to a layer decides the split, so the vocabulary is at most so large that
    this ratio stays. If no small candidate is split alike in every layout, it takes the one that is in most.
    """
    stages = sorted({layout.stages(user) for layout in layouts})
    wanted = [unevenness(user, count) for count in stages]
    # Enough rows for each of t ranks: below t (t − 1), pieces of ceil(vocab / t) may leave a rank none.
    least, remainder = tensor * max(tensor, -(-64 // tensor)), user.model.vocab_size % tensor
    smallest = min(user.model.vocab_size, least + remainder)
    first = min(user.model.num_layers, max(stages[-1], LAYERS))
    last = max(first, min(user.model.num_layers, LAYERS_A_STAGE * stages[-1]))
    ratio = head_cost(user).total / layer_cost(user).total
    best, most, vocabularies = (first, smallest), -1, list[int]()
    for layers in range(first, user.model.num_layers + 1):
        if layers > last and most >= 0:
            break
        sizes = small["model"] | {"num_layers": layers, "vocab_size": smallest}
        model = user.model.model_dump(mode="json") | sizes
        with suppress(ConfigError):  # the model rejects this depth, such as 5 layers in loops of two
            sections = corrected(user, small | {"model": model, "parallel": {}})
            config = resolve(sections, [], "verify", 1).config
            if not vocabularies:
                # A head may compute nothing that depends on the vocabulary, such as one of regression.
                head = head_cost(config).total
                largest = ratio * layer_cost(config).total / head * smallest if head else smallest
                multiples = [round(largest * part / 4) // tensor * tensor for part in range(5)]
                vocabularies = [max(least, rows) + remainder for rows in multiples]
            for rows in sorted({min(user.model.vocab_size, rows) for rows in vocabularies}):
                sized = config.model.model_copy(update={"vocab_size": rows})
                candidate = config.model_copy(update={"model": sized})
                splits = [unevenness(candidate, count) for count in stages]
                alike = sum(split == pattern for split, pattern in zip(splits, wanted, strict=True))
                if alike > most:
                    best, most = (layers, rows), alike
    return dict(zip(("num_layers", "vocab_size"), best, strict=True))


def unevenness(config: Config, stages: int) -> list[int]:
    """For each stage, how many different numbers of layers are below its own: [3,
    4, 4, 1] gives [1, 2, 2, 0].
    """
    split = [len(layers) for layers in stage_layers(partitioned(with_stages(config, stages)))]
    sizes = sorted(set(split))
    return [sizes.index(layers) for layers in split]


def with_stages(config: Config, stages: int) -> Config:
    """The resolved config with another number of stages, each on a rank of its own."""
    return config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"pipeline": stages, "chunks": 1})}
    )


def sections_of(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Turns {"model.num_layers": 2} into {"model": {"num_layers": 2}}."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        set_value(sections, key, value)
    return sections


def write_case(folder: Path, sections: dict[str, dict[str, Any]], masked: bool = False) -> Path:
    """Writes the small config and its corpora into `folder`; returns the config's path.

    The tokens are uniform, so that every row of the vocabulary occurs. Training reads a blend of two corpora,
    whose documents are of unlike lengths. The validation set ends within a sample, and within a batch. With
    `masked` some tokens are not learned, and some ranks learn nothing in a step.

    Where attention or packing heeds documents, a document is cut by the end of a sample that is learned, and
    targets beside the cut are
    learned in both its parts: corpora are drawn until it is so.
    """
    path, model = folder / "verify.json", sections.get("model", {})
    if (content := model.get("hf_config")) is not None:  # the case has its own folder, with the small content
        hf = folder / "hf"
        hf.mkdir(exist_ok=True)
        (hf / FILE).write_text(json.dumps(content), encoding="utf-8")
        sections = sections | {"model": model | {"hf": str(hf), "hf_revision": None}}
    path.write_text(json.dumps(sections), encoding="utf-8")
    config = load(str(path)).config
    data = {
        "train": [[share, str(folder / name)] for name, share in BLEND.items()],
        "valid": str(folder / "valid"),
    }
    path.write_text(json.dumps(sections | {"data": sections.get("data", {}) | data}), encoding="utf-8")
    for seed in range(DRAWS):
        rng = np.random.default_rng(seed)
        write_corpora(config, folder, rng)
        written = load(str(path)).config
        if masked:
            write_masks(written, rng)
        if not heeds_documents(config) or all(learned_at_cuts(written)):
            return path
    raise AssertionError(f"{DRAWS} corpora have no document that is cut in a learned sample")


def heeds_documents(config: Config) -> bool:
    """Whether anything depends on where documents end."""
    return config.data.document_mask or config.data.packing == "best_fit"


def learned_at_cuts(config: Config) -> tuple[int, int]:
    """Of the pieces of documents in the samples of all steps: how many end within a document,
    with a last token that is learned; and how many begin within one, with a second token that is
    learned (nothing predicts the first).
    """
    train, stream = config.train, checked_stream(config)
    number, _, samples = stream.locate(np.arange(train.steps * train.global_batch_size))
    before = behind = 0
    for c, sample in zip(number.tolist(), samples.tolist(), strict=True):
        corpus = stream.corpora[c]
        for start, length in stream.cuts[c].spans(sample):
            last, stop = start + length - 1, start + length
            before += (
                stop < corpus.num_tokens
                and together(corpus, last - 1, last, stop)
                and bool(corpus.learned(last, 1)[0])
            )
            behind += (
                start > 0
                and together(corpus, start - 1, start, start + 1)
                and bool(corpus.learned(start + 1, 1)[0])
            )
    return before, behind


def together(corpus: IndexedTokens, *positions: int) -> bool:
    """Whether tokens are of one document."""
    return len({corpus.document_at(position) for position in positions}) == 1


def write_corpora(config: Config, folder: Path, rng: np.random.Generator) -> None:
    """Writes the tokens for training and for validation.

    Packed documents would fit into samples, so now and then one is longer.
    """
    batch, seq_len = config.train.global_batch_size, config.train.seq_len
    lengths = dict.fromkeys(BLEND, (config.train.steps + 1) * batch * seq_len + 1) | {
        "valid": (batch + 3) * seq_len + 1 + seq_len // 3
    }
    for name, length in lengths.items():
        with IndexedWriter(str(folder / name), np.uint16) as writer:
            tokens = rng.integers(0, config.model.vocab_size, length)
            begins = rng.random(length) < OFTEN[name] / seq_len
            begins[0] = False  # the first document begins there in any case
            if config.data.packing == "best_fit":
                # none in the first third of six samples' tokens
                begins &= np.arange(length) // (2 * seq_len) % 3 > 0
            starts = np.flatnonzero(begins) if heeds_documents(config) else np.arange(1, 5) * length // 5
            starts.astype(np.int64).tofile(folder / f"{name}.starts")  # for the reference
            for document in np.split(tokens, starts):
                writer.write(document.astype(np.uint16))
                writer.end_document()


def write_masks(config: Config, rng: np.random.Generator) -> None:
    """Masks half of the tokens of all corpora, and all targets of some ranks.

    In the first step these are those of odd microbatches, which half of the data ranks have; in the second
    all but those in the middle of a sample, which one context rank has.
    """
    train, stream = config.train, checked_stream(config)
    for corpus in (*stream.corpora, IndexedTokens(str(config.data.valid))):
        (rng.random(corpus.num_tokens) < 0.5).astype(np.uint8).tofile(f"{corpus.prefix}{MASK}")
    masks = [np.memmap(f"{corpus.prefix}{MASK}", dtype=np.uint8, mode="r+") for corpus in stream.corpora]
    number, _, samples = stream.locate(np.arange(min(train.steps, 2) * train.global_batch_size))
    for index, (c, sample) in enumerate(zip(number.tolist(), samples.tolist(), strict=True)):
        mask = masks[c]
        positions = np.concatenate(
            [np.arange(start, start + length) for start, length in stream.cuts[c].spans(sample)]
        )
        at = np.arange(len(positions))  # in the sample, whose first token is no target
        if index >= train.global_batch_size:
            middle = (train.seq_len * 3 // 8 < at) & (at <= train.seq_len * 5 // 8)
            mask[positions[(at > 0) & ~middle]] = 0
        elif index // train.micro_batch_size % 2:
            mask[positions[1:]] = 0
    for mask in masks:
        mask.flush()
