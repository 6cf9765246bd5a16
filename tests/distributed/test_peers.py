"""Models of transformers with the same weights: logits, loss and every gradient
equal, on one process and in tp2·pp2.

The weights come by the mapping that export and import use, so that a wrong layout of any tensor is an error
here.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.distributed.buffers import buffers_of
from megacore.distributed.shard import materialise
from megacore.engine.choose import build_stages
from megacore.engine.native import NativeEngine
from megacore.expert_parallel import router
from megacore.model import attention, block
from megacore.model.batch import Microbatch
from megacore.pipeline.partition import plan_of
from megacore.pipeline.runtime import Runtime
from megacore.tools.interchange import deepseek, expert_families, gpt_oss, mapped
from megacore.tools.interchange.families import family_for_hf
from megacore.tools.launchers import place_from_environment
from tests import peers
from tests.build import mesh_of, run_of

# Sums of some hundred terms, in another order: fp32 rounds to 6e-8, fp64 to 1e-16.
TOLERANCE = {"fp32": 1e-5, "fp64": 1e-10}
LAYOUTS = {1: [], 4: ["parallel.tensor=2", "parallel.pipeline=2"]}
EXPERTS = ["parallel.expert=2", "parallel.expert_tensor=1"]  # over the tensor ranks


@dataclass(frozen=True)
class Piece:
    """A rank's slice of a gradient."""

    values: Tensor
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """What a rank computed: its gradients, and on the last stage its columns of the
    logits and the mean loss.
    """

    gradients: dict[str, Piece]
    logits: Tensor | None
    loss: float


def compute(config_path: str, overrides: list[str], weights: dict[str, Tensor]) -> Found:
    """One rank's forward and backward of `peers.tokens` with logical `weights`."""
    place = place_from_environment()
    config = run_of(config_path, *overrides, world=place.world_size)
    mesh = mesh_of(config)
    (stage,) = build_stages(config, mesh)
    materialise(stage.parameters(), mesh.device)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter.copy_(slice_of(weights[name], parameter.shard.offset, parameter.shape))  # type: ignore[attr-defined]
        for name, buffer in buffers_of([stage]).items():
            if name in weights:
                buffer.value.copy_(weights[name])
    seen: list[Tensor] = []
    (head,) = stage.behind or [None]
    plain = getattr(head, "logits", None)

    def logits(x: Tensor) -> Tensor:
        result = plain(x)
        seen.append(result.clone())  # the loss takes the logits' memory over
        return result

    if head is not None:
        head.logits = logits
    engine = NativeEngine(config, [stage], mesh)
    plan = plan_of(config)
    inputs, targets = (t.split(config.train.micro_batch_size) for t in peers.tokens())
    weight = 1 / peers.tokens()[0].numel()
    batch = [Microbatch(*pair) for pair in zip(inputs, targets, strict=True)]
    loss = Runtime([stage], engine, mesh.pp).run(plan, batch, {"cross_entropy": weight})["cross_entropy"]
    gradients = {name: Piece(g.clone(), shard.offset) for name, (g, shard) in engine.gradients().items()}
    found = Found(gradients, torch.cat(seen).detach() if seen else None, float(loss * weight))
    mesh.close()
    return found


def slice_of(whole: Tensor, offset: tuple[int, ...], shape: torch.Size) -> Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def relative(ours: Tensor, theirs: Tensor, whole: Tensor) -> float:
    """The largest difference of two pieces, relative to the largest element of what they are pieces of."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / whole.abs().max())


Measure = Callable[..., dict[str, float]]


@pytest.fixture
def measure(pool: Any, tmp_path: Path) -> Measure:
    """`measure(name, precision, world=1, **model)`: the differences from the peer, of logits, loss
    and each gradient on each rank.

    One process is this one, so that faults can be planted in it; `model` replaces keys of the model section
    that was read.
    """

    def run(name: str, precision: str, world: int = 1, **model: Any) -> dict[str, float]:
        peer = peers.reference(name)[precision]
        family = family_for_hf(peer.settings, "config.json")
        train = {
            "seq_len": 12,
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "precision": precision,
            "device": "cpu",
        }
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model": family.read(peer.settings) | model, "train": train}))
        mapping = family.mapped_from((), peer.settings)(run_of(path))
        assert sorted(peer.weights) == sorted(stored for tensor in mapping for stored in tensor.peers)
        weights = {tensor.name: tensor.join(peer.weights) for tensor in mapping}
        gradients = {tensor.name: tensor.join(peer.gradients) for tensor in mapping if not tensor.buffer}

        divided = EXPERTS if world > 1 and "num_experts_per_tok" in peer.settings else []
        arguments = (str(path), LAYOUTS[world] + divided, weights)
        ranks: list[Found] = [compute(*arguments)] if world == 1 else pool.run(world, compute, *arguments)
        differences: dict[str, float] = {}
        for found in ranks:
            for key, piece in found.gradients.items():
                right = slice_of(gradients[key], piece.offset, piece.values.shape)
                differences[key] = max(
                    differences.get(key, 0.0), relative(piece.values, right, gradients[key])
                )
        assert differences.keys() == gradients.keys(), "a parameter has no gradient"
        last = [(found.logits, found.loss) for found in ranks if found.logits is not None]
        logits = torch.cat([columns for columns, _ in last], -1).view(peer.logits.shape)
        return differences | {
            "logits": relative(logits, peer.logits, peer.logits),
            "loss": max(abs(loss / peer.loss - 1) for _, loss in last),
        }

    return run


@pytest.mark.parametrize("world", LAYOUTS)
@pytest.mark.parametrize("name", peers.PEERS)
@pytest.mark.parametrize("precision", TOLERANCE)
def test_equals_transformers(measure: Measure, name: str, precision: str, world: int) -> None:
    """Imported weights would be another model than the one that its makers trained."""
    differences = measure(name, precision, world)
    worst = max(differences, key=lambda key: differences[key])
    assert differences[worst] < TOLERANCE[precision], f"{worst} is off by {differences[worst]:.1e}"


# Planted faults: conventions that two code bases often do not share. Each must show by far more than
# rounding.


def rotate_neighbours(qkv: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, ...]:
    """Rotary positions that pair feature 2j with 2j + 1, as the first papers do, and not j with j + d/2."""
    half = qkv.shape[-1] // 2
    cos, sin = (table[..., :half].repeat_interleave(2, -1) for table in (cos, sin))
    q, k, v = (t.flatten(2, 3).transpose(1, 2) for t in qkv.split([qkv.shape[3] - 2, 1, 1], 3))
    q, k = (x * cos + torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2) * sin for x in (q, k))
    return q, k, v


def gate_for_up(name: str, shape: mapped.Shape, names: list[str]) -> mapped.Mapped:
    """Gate and up of swiglu taken for each other."""
    return STACKED(name, shape, names[::-1])


def heads_dealt_out(name: str, shape: mapped.Shape, names: list[str]) -> mapped.Mapped:
    """Query heads dealt out over the key/value heads one by one, instead of in groups."""

    def join(theirs: dict[str, Tensor]) -> Tensor:
        ours = GROUPED(name, shape, names).join(theirs)
        queries = ours[:, :-2]
        return torch.cat(
            (queries.flatten(0, 1).unflatten(0, queries.shape[1::-1]).transpose(0, 1), ours[:, -2:]), 1
        )

    return dataclasses.replace(GROUPED(name, shape, names), join=join)


def keys_for_values(name: str, shape: mapped.Shape, names: list[str]) -> mapped.Mapped:
    """Keys and values taken for each other."""
    return GROUPED(name, shape, [names[0], names[2], names[1]])


def fused_by_head(name: str, shape: mapped.Shape, peer: str) -> mapped.Mapped:
    """GPT-2's fused projection read as query, key and value of each head in turn."""
    return dataclasses.replace(FUSED(name, shape, peer), join=lambda theirs: theirs[peer].t().reshape(shape))


def as_they_are(tensor: mapped.Mapped, *_: object) -> mapped.Mapped:
    """Features that turn together side by side, and not half of them apart."""
    return tensor


def one_behind_the_other(name: str, shape: mapped.Shape, peer: str) -> mapped.Mapped:
    """All gates, then all ups, and not feature by feature."""
    right = SIDE_BY_SIDE(name, shape, peer)

    def join(theirs: dict[str, Tensor]) -> Tensor:
        return theirs[peer].unflatten(-1, (2, -1)).movedim((-2, -1), (1, 2)).contiguous()

    return dataclasses.replace(right, join=join)


def without_bias(_: Any, scores: Tensor) -> Tensor:
    """Experts chosen by their scores alone, as if files had no bias."""
    return scores.detach()


SIDE_BY_SIDE = gpt_oss.side_by_side
STACKED, GROUPED, FUSED = mapped.stacked, mapped.grouped_qkv, mapped.fused_qkv


@pytest.mark.parametrize(
    ("name", "place", "fault"),
    [
        ("llama", (attention, "rope_qkv"), rotate_neighbours),
        ("gpt2", (block.ACTIVATIONS, "gelu"), block.ACTIVATIONS["gelu_erf"]),
        ("gpt2", (mapped, "fused_qkv"), fused_by_head),
        ("llama", (mapped, "grouped_qkv"), heads_dealt_out),
        ("qwen3", (mapped, "grouped_qkv"), keys_for_values),
        ("qwen2", (mapped, "stacked"), gate_for_up),
        ("mixtral", (expert_families, "stacked"), gate_for_up),
        ("deepseek_v3", (deepseek, "half_apart"), as_they_are),
        ("gpt_oss", (gpt_oss, "side_by_side"), one_behind_the_other),
        ("deepseek_v3", (router.Router, "ranked"), without_bias),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_planted_fault_shows(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, name: str, place: tuple[Any, str], fault: Any
) -> None:
    setter = monkeypatch.setitem if isinstance(place[0], dict) else monkeypatch.setattr
    setter(*place, fault)
    assert_parts(measure(name, "fp64"))


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("granite", {"embedding_scale": 1.0}),
        ("granite", {"attention_scale": 8**-0.5}),
        ("granite", {"residual_scale": 1.0}),
        ("granite", {"logit_scale": 3.0}),  # multiplied, not divided
        ("llama tied, stretched, biases", {"rope_scaling": None}),
        ("qwen2", {"rope_scaling": None}),
        ("qwen3, yarn", {"rope_scaling": None}),
        ("llama", {"rope_theta": 10000.0}),
        ("gpt2 untied, exact gelu", {"activation": "gelu"}),
        ("gpt2 untied, exact gelu", {"attention_scale": 8**-0.5}),
        ("llama", {"norm_eps": 1e-5}),
        ("qwen3_moe", {"router_normalised": False}),
        ("olmoe", {"router_normalised": True}),
        ("mixtral", {"experts_per_token": 1}),
        ("deepseek_v3", {"attention_scale": 10**-0.5}),  # without mscale
        ("gpt_oss", {"activation": "swiglu"}),
        ("deepseek_v3", {"expert_groups": 1, "groups_per_token": 1}),
    ],
    ids=str,
)
def test_missed_setting_shows(measure: Measure, name: str, setting: dict[str, Any]) -> None:
    assert_parts(measure(name, "fp64", **setting))


def assert_parts(differences: dict[str, float]) -> None:
    """Far from equal, and in the logits already."""
    assert differences["logits"] > 1e4 * TOLERANCE["fp64"], (
        f"the logits differ by no more than {differences['logits']:.1e}"
    )
