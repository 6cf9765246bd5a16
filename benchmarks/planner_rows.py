"""Reads a table of measured steps: a row becomes a setting, a device, a cluster,
and the framework that ran it.
"""

import csv
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from megacore.errors import ConfigError
from megacore.files import read_text
from megacore.tools.planner.devices import Cluster, DeviceSpec, cluster_of, read_cluster, read_device
from megacore.tools.planner.workload import Latent, Mixture, Setting

DEVICES = {
    "A100-80GB": "a100",
    "A100-40GB": "a100 40gb",
    "H100-80GB": "h100",
    "H100-96GB-HBM2e-500W": "h100 96gb hbm2e",
    "H200-141GB": "h200",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "MI300X": "mi300x",
}
# The cluster of a row whose `interconnect` names no other, where it is not the device's own.
CLUSTERS = {"a100 40gb": "a100_roce"}
# What the whole of `interconnect` says, of a machine; it counts if the cluster is one of the row's device.
NETWORKS = (
    (r".*\bEFA", "p5"),
    (r"RoCE 1600.*", "a100_roce"),
    (r"8x HDR IB 800Gb/s/node.*", "a100_800g"),
    (r"800Gb/s", "h100_800g"),
    (r"400Gb/s", "a100_400g"),
)
# as published
SCHEDULES = {
    "interleaved-1f1b": "interleaved",
    "zb1p": "zb_h1",
    "zbv": "zb_v",
    "v-half": "v_half",
    "v-min": "v_min",
}
PROFILES = (
    ("nanotron", "nanotron"),
    ("vTrain", "megatron-2023"),
    ("Megatron-LM", "megatron-2022"),
    ("NeMo", "nemo"),
    ("NEMO", "nemo"),
    ("Megatron-Bridge", "nemo"),
    ("llm-foundry", "llm-foundry"),
    ("torchtitan", "torchtitan"),
    ("fms-fsdp", "fms-fsdp"),
    ("MaxText", "jax"),
    ("PaxML", "jax"),
)
# Of mixtures whose model says what a row does not: experts that all tokens go through, and the part of blocks
# that have experts.
MIXTURES = {"llama4-maverick": (1, 0.5), "deepseek-v3": (1, 58 / 61), "kimi-k2": (1, 60 / 61)}
HEAD_SIZES = {"qwen3-30b": 128, "gpt-oss": 64}  # where heads do not divide the hidden size
# of DeepSeek-V3 and Kimi K2, by their papers
LATENT = Latent(keys=512, queries=1536, plain=128, turned=64, value=128)
# Megatron-Bridge's recipes (scripts/performance) exchange rows by DeepEP or HybridEP, which send a token once
# to each machine. The largest whole number that a cell may hold, of columns whose parts are counted one by
# one; of all others.
MOST = {"layers": 2**14, "pp": 2**10, "vp": 2**10}
MOST_ELSE = 2**24
MAY_BE_ZERO = ("zero", "experts")


@dataclass(frozen=True)
class Row:
    """A measurement: what ran, on what, and what came of it."""

    source: str
    framework: str  # the profile's name
    model: str
    setting: Setting
    device: DeviceSpec
    cluster: Cluster
    fits: bool
    seconds: float | None  # a step's
    memory_gib: float | None
    note: str

    @property
    def group(self) -> tuple[str, str, int]:
        """Rows among which a layout can be chosen: the same source, model and device, on as
        many ranks, with as large a batch.
        """
        s = self.setting
        return (
            self.source,
            f"{self.model} {self.device.name} {s.precision} seq {s.seq} batch {s.global_batch} kv "
            f"{s.kv_heads}",
            s.world,
        )


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be predicted, and why."""

    source: str
    why: str


def read(path: Path) -> tuple[list[Row], list[Skipped]]:
    """The table's rows. Raises `ConfigError` if it is no such table."""
    found, right = [], "the columns of benchmarks/measured_steps.csv"
    try:
        table = csv.DictReader(read_text(path).splitlines(), restval="")
    except OSError as error:
        raise ConfigError(
            "DATA.csv", f"cannot read {path}: {error.strerror}", "a table of measured steps"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError("DATA.csv", f"{path} is no text: {error}", right) from None
    try:
        for row in table:
            found.append(_row(row))
    except KeyError as error:
        raise ConfigError("DATA.csv", f"{path} has no column {error}", right) from None
    except (ValueError, csv.Error) as error:
        raise ConfigError("DATA.csv", f"{path}, line {table.line_num}: {error}", right) from None
    return [row for row in found if isinstance(row, Row)], [row for row in found if isinstance(row, Skipped)]


def _row(r: dict[str, str]) -> Row | Skipped:
    """One row. Raises `ValueError` if a cell cannot be."""
    source, ok = r["source_id"], r["status"] == "ok"
    if r["status"] not in ("ok", "failed"):
        raise ValueError(f"status is {r['status']!r}, and not ok or failed")

    def number(name: str, default: int = 1) -> int:
        least, most = int(name not in MAY_BE_ZERO), MOST.get(name, MOST_ELSE)
        value = float(r[name] or default)
        if not least <= value <= most or value != int(value):
            raise ValueError(f"{name} is {r[name]}, and not a whole number from {least} to {most:,}")
        return int(value)

    def amount(name: str) -> float | None:
        value = float(r[name]) if r[name] else None
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} is {r[name]}, and not a number above 0")
        return value

    if r["arch"] not in ("dense", "moe", "moe-mla"):
        return Skipped(source, f"{r['arch']} is no architecture of this model")
    for name in ("hidden", "layers", "heads", "seq", "gbs", "mbs", "tp", "pp", "dp"):
        if not r[name]:
            return Skipped(source, f"{name} is not stated")
    if r["hardware"] not in DEVICES:
        return Skipped(source, f"{r['hardware']} is not a known device")
    if ok and not r["step_time_s"]:
        return Skipped(source, "no step time")
    profile = next((name for key, name in PROFILES if key in r["framework"]), None)
    if profile is None:
        return Skipped(source, f"{r['framework']} has no profile")
    device = DEVICES[r["hardware"]]
    said = (name for words, name in NETWORKS if re.fullmatch(words, r["interconnect"]))
    network = next((name for name in said if device in read_cluster(name).devices), CLUSTERS.get(device))
    spec = read_device(device)
    precision = r["precision"]
    kind = (
        "nvfp4"
        if "fp4" in precision
        else "fp8"
        if "fp8" in precision
        else "fp16"
        if precision.startswith("fp16")
        else "bf16"
    )
    recompute = next(
        (mode for mode in ("none", "selective", "full") if r["recompute"].startswith(mode)), "none"
    )
    if profile == "torchtitan":
        if "rowwise" in precision:
            # scales by row: what the products gain goes to scales and casts, and messages stay in 16 bits
            kind = "bf16"
        recompute = "per_op" if recompute == "selective" else recompute
    if profile == "fms-fsdp" and recompute == "selective":
        recompute = "half"
    tensor, zero = number("tp"), number("zero", 0)
    latent = LATENT if r["arch"] == "moe-mla" else None
    known_size = next(
        (size for name, size in HEAD_SIZES.items() if r["model"].startswith(name)),
        number("hidden") // number("heads"),
    )
    setting = Setting(
        layers=number("layers"),
        hidden=number("hidden"),
        ffn=number("ffn"),
        heads=number("heads"),
        kv_heads=number("kv_heads", number("heads")),
        head_size=known_size if latent is None else (latent.plain + latent.turned + latent.value) // 2,
        latent=latent,
        vocab=number("vocab"),
        seq=number("seq"),
        gated=r["mlp"] in ("swiglu", "geglu"),
        tensor=tensor,
        pipeline=number("pp"),
        context=number("cp"),
        data=number("dp"),
        chunks=number("vp"),
        context_method="ring" if profile in ("nemo", "torchtitan") else "gather",
        async_tensor="async TP" in r["note"],
        sequence=r["sp"] == "1" if r["sp"] else tensor > 1,
        micro_batch=number("mbs"),
        global_batch=number("gbs"),
        precision=kind,
        recompute=recompute,
        compiled=any("compile" in r.get(name, "") for name in ("framework", "engine", "note")),
        schedule=SCHEDULES.get(r["schedule"], r["schedule"] or "1f1b"),
        flash=profile not in ("megatron-2023", "megatron-2022"),
        zero=zero,
        gradient_bytes=2 if "pure" in precision or zero == 3 or profile == "nemo" else 4,
    )
    if experts := number("experts", 0):
        if not r["topk"] or not r["moe_ffn"]:
            return Skipped(source, "of its experts a size is not stated")
        shared, share = next(
            (known for name, known in MIXTURES.items() if r["model"].startswith(name)), (0, 1.0)
        )
        chosen, ffn, parts = number("topk"), number("moe_ffn"), number("etp", tensor)
        once = "Megatron-Bridge" in r["framework"]
        mixture = Mixture(
            experts, chosen, ffn, shared * ffn, share, number("ep"), parts, copies=False, once=once
        )
        if experts % mixture.ranks or setting.data * setting.context * tensor % (mixture.ranks * parts):
            return Skipped(source, f"ep {mixture.ranks} × etp {parts} do not divide experts and ranks")
        setting = replace(setting, mixture=mixture)
    # tied embeddings are not stated: they are where one copy of the vocabulary explains the parameters better
    if stated := amount("params_b"):
        whole = None if setting.mixture is None else replace(setting.mixture, ranks=1, parts=1)
        blocks = setting.layers * replace(setting, tensor=1, mixture=whole).block_parameters
        vocabulary = setting.vocab * setting.hidden
        setting = replace(
            setting,
            tied=abs(blocks + vocabulary - 1e9 * stated) < abs(blocks + 2 * vocabulary - 1e9 * stated),
        )
    return Row(
        source=source,
        framework=profile,
        model=r["model"] if r["model"] != "gpt" else f"gpt {r['layers']}x{r['hidden']}",
        setting=setting,
        device=spec,
        cluster=read_cluster(network) if network else cluster_of(spec),
        fits=ok,
        seconds=amount("step_time_s"),
        memory_gib=amount("mem_gib"),
        note=r["note"],
    )
