"""Evaluating and fine-tuning: `launch/evaluate.py` gives the training log's figures in any layout,
and weights alone start a run.
"""

import contextlib
import io
import json
import math
import shutil
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from launch.evaluate import evaluation_config, parse, run
from megacore.checkpoint import Reader, locate
from megacore.checkpoint.weights import WEIGHTS
from megacore.config import Config
from megacore.data.indexed import IndexedTokens
from megacore.data.samples import EvalSamples
from megacore.distributed.buffers import BUFFERS, buffers_of
from megacore.distributed.rank_info import RankInfo
from megacore.distributed.shard import Shard
from megacore.errors import CheckpointError, ConfigError, DataError
from megacore.tools.checkpoint_weights import load_weights
from megacore.tools.choices.run import trainer_of
from megacore.tools.inputs import Inputs
from megacore.tools.interchange.import_model import PEERS, import_model
from megacore.tools.interchange.settings import read_gpt2
from megacore.tools.launchers import place_from_environment
from megacore.tools.prepare.prepare import prepare
from megacore.tools.text.tokenizer import load_tokenizer
from tests import training
from tests.build import mesh_of, model_of, run_of
from tests.checkpoints import save
from tests.pool import ROOT

TP2PP2 = ["parallel.tensor=2", "parallel.pipeline=2"]
# Both are sums of the same fp32 losses, each of a relative rounding of 6e-8; another layout sums logits in
# another order.
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with source code as bytes and the config of a GPT-2-shaped model for it."""
    folder = tmp_path_factory.mktemp("text")
    library = Path(textwrap.__file__).parent  # whose files no change of ours touches
    sources = [str(library / f"{name}.py") for name in ("heapq", "shlex", "bisect", "fnmatch", "textwrap")]
    prepare(sources[2:], str(folder / "code"), "bytes")
    # Not a fraction, which a hash of their text would choose; and of a size that leaves the last batch of 8 ×
    # 16 short.
    (folder / "valid.txt").write_bytes("".join(map(read_ascii, sources[:2])).encode()[: 60 * 128 + 37])
    prepare([str(folder / "valid.txt")], str(folder / "code_valid"), "bytes")
    training.write_config(
        folder,
        str(folder / "code"),
        model={"num_layers": 2, "vocab_size": 257},
        train={"steps": 30, "eval_every": 10, "eval_batches": 0},
        optim={"lr": 1e-2},
        data={"train": str(folder / "code"), "valid": str(folder / "code_valid"), "tokenizer": "bytes"},
        checkpoint={"every": 30},
    )
    return folder


def read_ascii(path: str) -> str:
    return Path(path).read_text(encoding="utf-8").encode("ascii", "replace").decode()


def config_of(text: Path, log_dir: Path, *overrides: str) -> Config:
    return run_of(text / "config.json", *overrides, f"log.dir={log_dir}")


@pytest.fixture(scope="module")
def base(pool: Any, text: Path) -> Path:
    """A run's folder, trained on the text."""
    assert pool.run(1, training.run_rank, str(text / "config.json"), [], str(text / "base")) == [0]
    return text / "base"


def figures_of(arguments: list[str], out: str) -> dict[str, Any] | None:
    """What rank 0 measured."""
    place = place_from_environment()
    with contextlib.redirect_stdout(io.StringIO()):
        assert run([*arguments, "--json", out], place) == 0
    return json.loads(Path(out).read_text()) if place.rank == 0 else None


def validations(folder: Path) -> dict[int, float]:
    """Validation losses by step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["valid_loss"] for line in lines if "valid_loss" in line}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(1, []), (4, TP2PP2), (2, ["parallel.tensor=2", "parallel.sequence=true"]), (2, ["parallel.data=2"])],
)
def test_evaluate_is_the_logs_validation(
    pool: Any, text: Path, base: Path, tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    """Another weighting of batches or targets, or weights of another step, would part from the log."""
    figures = pool.run(ranks, figures_of, ["--checkpoint", str(base), *layout], f"{tmp_path}/figures.json")[0]
    assert figures["nats_per_token"] == pytest.approx(validations(base)[30], rel=ROUNDING)
    assert figures["nats_per_token"] != pytest.approx(validations(base)[20], rel=100 * ROUNDING)
    corpus = IndexedTokens(str(text / "code_valid"))
    assert figures["targets"] == figures["bytes"] == corpus.num_tokens - 1, (
        "of bytes, every token but the first is a byte to predict"
    )
    assert figures["bits_per_byte"] == pytest.approx(figures["nats_per_token"] / math.log(2), rel=1e-12)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["nats_per_token"]), rel=1e-12)


def test_the_figure_is_the_mean_over_all_targets(pool: Any, text: Path, base: Path, tmp_path: Path) -> None:
    """Against plain PyTorch: the corpus cut into windows of 16, the last one shorter.

    A mean of batches' means is another number.
    """
    figures = pool.run(1, figures_of, ["--checkpoint", str(base)], f"{tmp_path}/figures.json")[0]
    model = model_of(config_of(text, base)).eval()
    load_weights(Reader(locate(base)), [model])
    tokens = torch.from_numpy(
        IndexedTokens(str(text / "code_valid")).read(0, figures["targets"] + 1).astype("int64")
    )
    losses = []
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 16):
            window = tokens[start : start + 17]
            losses.append(
                cross_entropy(
                    model.logits(model.hidden(window[None, :-1])), window[1:], reduction="none"
                ).double()
            )
    assert figures["nats_per_token"] == pytest.approx(float(torch.cat(losses).mean()), rel=ROUNDING)
    batches = [torch.cat(losses[i : i + 8]).mean() for i in range(0, len(losses), 8)]
    assert figures["nats_per_token"] != pytest.approx(float(torch.stack(batches).mean()), rel=100 * ROUNDING)


def test_part_of_a_corpus_is_the_logs_part(pool: Any, text: Path, tmp_path: Path) -> None:
    """`--batches` must take the samples that `train.eval_batches` takes, and count their text alone."""
    config = str(text / "config.json")
    assert pool.run(
        1,
        training.run_rank,
        config,
        ["train.steps=2", "train.eval_batches=3", "checkpoint.every=2"],
        f"{tmp_path}/run",
    ) == [0]
    figures = pool.run(
        1, figures_of, ["--checkpoint", f"{tmp_path}/run", "--batches", "3"], f"{tmp_path}/figures.json"
    )[0]
    assert figures["nats_per_token"] == pytest.approx(validations(tmp_path / "run")[2], rel=ROUNDING)
    assert figures["targets"] == figures["bytes"] == 3 * 8 * 16


def test_documents_stay_apart_as_in_the_run(pool: Any, text: Path, tmp_path: Path) -> None:
    """A run with `data.document_mask` would be measured without it: more targets,
    and another loss than its log's.
    """
    config, corpus = str(text / "config.json"), str(text / "code")
    overrides = ["data.document_mask=true", f"data.valid={corpus}", "train.steps=2", "checkpoint.every=2"]
    assert pool.run(1, training.run_rank, config, overrides, f"{tmp_path}/run") == [0]
    figures = pool.run(1, figures_of, ["--checkpoint", f"{tmp_path}/run"], f"{tmp_path}/figures.json")[0]
    assert figures["nats_per_token"] == pytest.approx(validations(tmp_path / "run")[2], rel=ROUNDING)
    assert figures["targets"] == IndexedTokens(corpus).num_tokens - 3, (
        "the first of each of the three documents is none"
    )


@pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("documents", [[], ["data.document_mask=true", "data.packing=best_fit"]], ids=str)
def test_context_ranks_evaluate_as_one_does(
    pool: Any, text: Path, base: Path, tmp_path: Path, method: str, documents: list[str]
) -> None:
    """With and without documents packed whole: a target lost where pieces meet, or
    counted on each rank, is another mean.
    """
    arguments = ["--checkpoint", str(base), "--data", str(text / "code"), "--batches", "4", *documents]
    one = pool.run(1, figures_of, arguments, f"{tmp_path}/one.json")[0]
    context = ["parallel.context=2", f"parallel.context_method={method}"]
    two = pool.run(2, figures_of, [*arguments, *context], f"{tmp_path}/two.json")[0]
    assert two["nats_per_token"] == pytest.approx(one["nats_per_token"], rel=ROUNDING)
    assert {key: two[key] for key in ("targets", "bytes")} == {key: one[key] for key in ("targets", "bytes")}


def test_bytes_of_pieces(pool: Any, tmp_path: Path) -> None:
    """Bits per byte of a sentencepiece corpus: the bytes are the text's own, which prepare
    counted before there were tokens.
    """
    prepared = prepare([str(ROOT / "tests/pool.py")], str(tmp_path / "pieces"), "sentencepiece:400").splits[
        str(tmp_path / "pieces")
    ]
    model = {"vocab_size": 400, "num_layers": 1}
    path = training.write_config(
        tmp_path, str(tmp_path / "pieces"), model=model, data={"tokenizer": f"{tmp_path}/pieces.model"}
    )
    weights = training.write_weights(tmp_path / "checkpoints", run_of(path))
    figures = pool.run(
        1,
        figures_of,
        ["--checkpoint", str(weights), "--data", str(tmp_path / "pieces")],
        f"{tmp_path}/figures.json",
    )[0]
    first = int(IndexedTokens(str(tmp_path / "pieces")).read(0, 1)[0])
    of_first = len(load_tokenizer(f"{tmp_path}/pieces.model").token_bytes(first))
    assert of_first > 0 and figures["bytes"] == prepared.text_bytes - of_first, (
        "the first token is no target, and all others are"
    )
    nats = figures["nats_per_token"] * figures["targets"]
    assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / figures["bytes"], rel=1e-12)


def word_pieces(folder: Path, text: str) -> str:
    """A tokenizer.json of BERT's kind: lower case, one space between words, and [CLS] before a text."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    fast = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    fast.normalizer = tokenizers.normalizers.BertNormalizer()
    fast.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    fast.decoder = tokenizers.decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    fast.train_from_iterator([text], trainer)
    fast.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    fast.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_bytes_of_a_text_that_its_tokens_do_not_keep(pool: Any, tmp_path: Path) -> None:
    """Runs of spaces are no tokens of such a tokenizer; bits per byte are of the text as it was.

    So they do not change with the number of batches, either.
    """
    text = "Some   Words,  with    spaces\n\n   that no token keeps.\n" * 60
    (tmp_path / "a.txt").write_text(text)
    name, prefix = word_pieces(tmp_path, text), str(tmp_path / "words")
    sidecar = prepare([str(tmp_path / "a.txt")], prefix, name).splits[prefix]
    assert sidecar.spelled_bytes is not None and sidecar.spelled_bytes < 0.9 * len(text)
    model = {"vocab_size": 300, "num_layers": 1}
    path = training.write_config(tmp_path, prefix, model=model, data={"tokenizer": name})
    weights = training.write_weights(tmp_path / "checkpoints", run_of(path))
    arguments = ["--checkpoint", str(weights), "--data", prefix]
    figures = pool.run(1, figures_of, arguments, f"{tmp_path}/figures.json")[0]
    assert figures["bytes"] == pytest.approx(len(text), abs=2)  # the first token, [CLS], has no bytes
    part = pool.run(1, figures_of, [*arguments, "--batches", "2"], f"{tmp_path}/figures.json")[0]
    per_byte, per_byte_of_part = (f["nats_per_token"] * f["targets"] / f["bytes"] for f in (figures, part))
    assert per_byte_of_part == pytest.approx(per_byte, rel=0.05)


def test_each_window_may_begin_with_the_bos_token(pool: Any, tmp_path: Path) -> None:
    """The targets stay the same; a model that needs the token is measured as it is used."""
    text = "Words of a text that is longer than a window. " * 40
    (tmp_path / "a.txt").write_text(text)
    name, prefix = word_pieces(tmp_path, text), str(tmp_path / "words")
    prepare([str(tmp_path / "a.txt")], prefix, name)
    plain, begun = EvalSamples(prefix, 16, 300), EvalSamples(prefix, 16, 300, bos=1)
    numbers = np.arange(len(plain))
    inputs, targets = plain.samples(numbers)
    begun_inputs, begun_targets = begun.samples(numbers)
    assert (begun_inputs[:, 0] == 1).all() and (inputs[1:, 0] != 1).all()
    assert np.array_equal(begun_inputs[:, 1:], inputs[:, 1:]) and np.array_equal(begun_targets, targets)

    model = {"vocab_size": 300, "num_layers": 1, "init_std": 0.3}
    path = training.write_config(tmp_path, prefix, model=model, data={"tokenizer": name})
    weights = training.write_weights(tmp_path / "checkpoints", run_of(path))
    arguments = ["--checkpoint", str(weights), "--data", prefix]
    figures = [
        pool.run(1, figures_of, [*arguments, *more], f"{tmp_path}/figures.json")[0]
        for more in ([], ["--bos-each-window"])
    ]
    assert figures[0]["targets"] == figures[1]["targets"] and figures[0]["bytes"] == figures[1]["bytes"]
    assert abs(figures[0]["nats_per_token"] - figures[1]["nats_per_token"]) > 1e-3
    for tokenizer in ("bytes", "null"):
        mistake = evaluate_mistake([*arguments, "--bos-each-window", f"data.tokenizer={tokenizer}"])
        assert mistake.startswith("config error: --bos-each-window: ")


def test_packed_documents_begin_with_the_bos_token(tmp_path: Path) -> None:
    """Each of those that share a sample, and each part of one that is longer."""
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in ("abc", "de", "f" * 20))
    )
    prepare([str(tmp_path / "a.jsonl")], str(tmp_path / "out"), "bytes")
    samples = EvalSamples(str(tmp_path / "out"), 8, 256, "best_fit", bos=7)
    for index in range(len(samples)):
        tokens, targets = samples.samples(np.array([index]))
        begins = [
            begin for begin in samples.documents(np.array([index]))[0] if begin < 8 and tokens[0][begin]
        ]
        assert np.flatnonzero(tokens[0] == 7).tolist() == begins and 7 not in targets


@pytest.mark.parametrize(
    ("more", "printed"),
    [
        ([], "61, all of them (the run's validation reads 3: --batches 3)"),
        (["--batches", "3"], "3 of 61"),
        (["--batches", "70"], "61, all of them (the run's validation reads 3: --batches 3)"),
        (["--data", "VALID"], "61, all of them"),
    ],
)
def test_it_says_how_many_batches_it_reads(
    more: list[str], printed: str, text: Path, tmp_path: Path, capsys: Any
) -> None:
    """The run's log has the mean of some batches, and without a word the two figures would not agree."""
    config = config_of(text, tmp_path, "train.eval_batches=3")
    weights = training.write_weights(tmp_path / "checkpoints", config)
    more = [str(text / "code_valid") if word == "VALID" else word for word in more]
    assert run(["--checkpoint", str(weights), *more, "--json", f"{tmp_path}/figures.json"], RankInfo()) == 0
    rows = [" ".join(line.strip("│ ").split()) for line in capsys.readouterr().out.splitlines()]
    [row] = [row for row in rows if row.startswith("batches")]
    assert row.replace("│ ", "") == f"batches {printed}"
    read = int(printed.partition(",")[0].partition(" ")[0])
    assert json.loads((tmp_path / "figures.json").read_text())["batches"] == read


def evaluate_mistake(arguments: list[str]) -> str:
    with pytest.raises((CheckpointError, ConfigError, DataError)) as raised:
        run(arguments, RankInfo())
    return str(raised.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_checkpoint_cannot_be_evaluated(
    text: Path, tmp_path: Path, capsys: Any, value: float
) -> None:
    """A script would take the status 0, and a table of NaNs, for a measurement."""
    weights = training.write_weights(tmp_path / "checkpoints", config_of(text, tmp_path), value=value)
    expected = f"checkpoint error: {weights}: its loss is nan: the run has diverged (an earlier checkpoint)"
    assert evaluate_mistake(["--checkpoint", str(weights), "--batches", "1"]) == expected
    assert capsys.readouterr().out == ""


def test_mistakes_in_evaluating(text: Path, base: Path, tmp_path: Path) -> None:
    """One clear line each, before any rank waits."""
    checkpoint = ["--checkpoint", str(base)]
    assert evaluate_mistake([*checkpoint, "--data", "nowhere"]).startswith("data error: nowhere.bin: missing")
    assert evaluate_mistake([*checkpoint, "data.valid=null"]).startswith(
        "config error: --data: no corpus is given"
    )
    assert evaluate_mistake([*checkpoint, "--json", str(tmp_path)]).startswith("config error: --json: ")
    prepare([str(ROOT / "tests/pool.py")], str(tmp_path / "pieces"), "sentencepiece:400")
    assert "beyond a vocabulary of 257" in evaluate_mistake([*checkpoint, "--data", str(tmp_path / "pieces")])
    assert evaluate_mistake([*checkpoint, "--tokenizer", str(tmp_path / "pieces.model")]).startswith(
        "config error: --tokenizer: "
    )


# --- fine-tuning --------------------------------------------------------------------------------------------


def fine_tune(
    pool: Any, text: Path, log_dir: Path, weights: Path, *overrides: str, ranks: int = 1
) -> list[dict[str, Any]]:
    """Its logged steps."""
    arguments = [f"checkpoint.weights={weights}", "train.seed=1", "optim.lr=3e-3", *overrides]
    assert (
        pool.run(ranks, training.run_rank, str(text / "config.json"), arguments, str(log_dir)) == [0] * ranks
    )
    return training.metrics(log_dir)


def test_fine_tuning_lowers_the_validation_loss(pool: Any, text: Path, tmp_path: Path) -> None:
    """Of an imported GPT-2 with more positions than the run's sequences have tokens."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install -e '.[test]'"
    )
    sizes = {
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 4,
        "n_positions": 32,
        "vocab_size": 257,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    import_model(PEERS["hf"](tmp_path / "gpt2"), tmp_path / "import", [], None, lambda line: None)

    arguments = [
        "--checkpoint",
        str(tmp_path / "import"),
        "--data",
        str(text / "code_valid"),
        "train.seq_len=16",
    ]
    before = pool.run(1, figures_of, arguments, f"{tmp_path}/figures.json")[0]["nats_per_token"]
    fine_tune(pool, text, tmp_path / "run", tmp_path / "import", "model.max_positions=32")
    assert validations(tmp_path / "run")[30] < 0.8 * before


def test_the_example_config_is_gpt2() -> None:
    """configs/finetune_gpt2.json would refuse the model that it is for."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install -e '.[test]'"
    )
    published = json.loads(transformers.GPT2Config(architectures=["GPT2LMHeadModel"]).to_json_string())
    config = run_of(ROOT / "configs/finetune_gpt2.json")
    imported, ours = read_gpt2(published), config.model.model_dump()
    assert {key: ours[key] for key in imported} == imported
    assert config.checkpoint.weights is not None


def test_fine_tuning_starts_from_the_weights_alone(pool: Any, text: Path, base: Path, tmp_path: Path) -> None:
    """Step 1 on, its own samples, schedule and moments; the first loss is the trained
    model's, and the same in every layout.
    """
    steps = fine_tune(pool, text, tmp_path / "run", base, "train.steps=4")
    assert [figures["step"] for figures in steps] == [1, 2, 3, 4] and steps[0]["lr"] == 3e-3 / 5
    assert steps[0]["loss"] < 0.75 * math.log(257), "the base's loss, not a fresh model's"
    moments = Reader(tmp_path / "run/checkpoints/step_00000004")
    assert moments.state["engine"]["updates"] == 4
    spread = fine_tune(pool, text, tmp_path / "spread", base, "train.steps=4", *TP2PP2, ranks=4)
    assert [m["loss"] for m in spread] == pytest.approx([m["loss"] for m in steps], rel=1e-5)
    assert [m["grad_norm"] for m in spread] == pytest.approx([m["grad_norm"] for m in steps], rel=1e-5)


def test_the_weights_of_a_mixture_come_with_its_buffers(text: Path, tmp_path: Path) -> None:
    """A fine-tuning without the biases of the routers would send tokens to other experts than the base did,
    and so would an evaluation. Moments and the count of updates are not taken.
    """
    mixture = ["model.num_experts=4", "model.experts_per_token=2", "model.router_bias_rate=0.1"]
    mixture += ["model.router_balance=global", "train.eval_every=0"]
    assert (
        training.run_rank(str(text / "config.json"), [*mixture, "train.steps=3"], str(tmp_path / "base")) == 0
    )
    reader = Reader(locate(tmp_path / "base"))
    base = {
        name: reader.read(name, Shard(tensor.shape))
        for name, tensor in reader.manifest.tensors.items()
        if name.startswith((WEIGHTS, BUFFERS))
    }
    biases = [tensor for name, tensor in base.items() if name.endswith("router.bias")]
    assert len(biases) == 2 and all(bias.any() for bias in biases)

    config = config_of(text, tmp_path / "run", *mixture, f"checkpoint.weights={tmp_path}/base")
    mesh = mesh_of(config)
    engine = trainer_of(config, mesh, Inputs(config, rank=0)).engine
    tensors = {name: tensor for name, (tensor, _) in engine.tensors().items()}
    assert [name for name in base if not torch.equal(tensors[name], base[name])] == []
    assert [name for name in tensors.keys() - base.keys() if tensors[name].any()] == []
    assert engine.state()["updates"] == 0

    stage = model_of(config)
    load_weights(reader, [stage])
    loaded = {f"{WEIGHTS}{name}": parameter for name, parameter in stage.named_parameters()}
    loaded |= {f"{BUFFERS}{name}": buffer.value for name, buffer in buffers_of([stage]).items()}
    assert [name for name in base if not torch.equal(loaded[name], base[name])] == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_interrupted_fine_tuning_goes_on_from_its_own(
    pool: Any, text: Path, base: Path, tmp_path: Path, precision: str
) -> None:
    """`checkpoint.weights` counts only where there is nothing to resume: else every
    restart would begin anew.
    """
    shutil.copytree(base, tmp_path / "base")
    options = ["checkpoint.every=2", "optim.decay_steps=5", f"train.precision={precision}"]
    whole = fine_tune(pool, text, tmp_path / "whole", base, *options, "train.steps=4")
    fine_tune(pool, text, tmp_path / "run", tmp_path / "base", *options, "train.steps=2")
    shutil.rmtree(tmp_path / "base")
    again = fine_tune(pool, text, tmp_path / "run", tmp_path / "base", *options, "train.steps=4")
    assert [(m["step"], m["loss"], m["grad_norm"]) for m in again] == [
        (m["step"], m["loss"], m["grad_norm"]) for m in whole
    ]


def altered(text: Path, folder: Path, change: str) -> Path:
    """An import in which one tensor is missing, too many, or of another shape."""
    reader = Reader(training.write_weights(folder / "good", config_of(text, folder)))
    tensors = {
        name: (reader.read(name, Shard(t.shape)), Shard(t.shape))
        for name, t in reader.manifest.tensors.items()
    }
    if change == "missing":
        del tensors["model/norm.bias"]
    else:
        name = "model/norm.bias" if change == "shape" else "model/blocks.2.norm1.bias"
        tensors[name] = (tensors["model/norm.bias"][0][:31], Shard((31,)))
    return save(folder / change, 0, tensors, reader.state, keep=1)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("missing", "has no tensor model/norm.bias of shape (32,)"),
        ("shape", "tensor model/norm.bias has shape (31,), and the model of this config (32,)"),
        ("extra", "holds the tensor model/blocks.2.norm1.bias, which the model of this config does not have"),
    ],
)
def test_other_weights_are_refused_by_name(text: Path, tmp_path: Path, change: str, line: str) -> None:
    path = altered(text, tmp_path, change)
    with pytest.raises(CheckpointError) as raised:
        Inputs(config_of(text, tmp_path / "run", f"checkpoint.weights={path}"), rank=0)
    assert (
        str(raised.value).startswith(f"checkpoint error: {path}: {line}") and not (tmp_path / "run").exists()
    )


def test_a_tokenizer_that_is_not_there_is_refused_at_the_start(text: Path, tmp_path: Path) -> None:
    """It was missed when the run had ended, by whoever wanted to see text."""
    for name in (f"{tmp_path}/none.model", str(tmp_path)):
        with pytest.raises(
            ConfigError, match=rf"data.tokenizer: there is no file {name} \(launch/prepare.py makes one"
        ):
            Inputs(config_of(text, tmp_path / "run", f"data.tokenizer={name}"), rank=0)
    assert not (tmp_path / "run").exists()
    Inputs(config_of(text, tmp_path / "run", "data.tokenizer=bytes"), rank=0)


def test_resume_and_weights_are_told_apart(text: Path, base: Path, tmp_path: Path) -> None:
    """Weights alone cannot be resumed; another model's cannot be a start."""
    weights = training.write_weights(tmp_path / "import", config_of(text, tmp_path))
    with pytest.raises(CheckpointError, match="holds weights alone.*checkpoint.weights="):
        Inputs(config_of(text, tmp_path / "run", f"checkpoint.resume={weights}"), rank=0)
    with pytest.raises(
        CheckpointError, match=r"model\.num_heads=4 \(the config says 2\).* model\.head_size=8"
    ):
        Inputs(config_of(text, tmp_path / "run", f"checkpoint.weights={base}", "model.num_heads=2"), rank=0)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Inputs(config_of(text, tmp_path / "run", f"checkpoint.weights={tmp_path}/nowhere"), rank=0)


@pytest.mark.parametrize(
    ("words", "device"),
    [
        ([], "auto"),
        (["--device", "cpu"], "cpu"),
        (["train.device=cpu"], "cpu"),
        (["--device", "cuda", "train.device=cpu"], "cpu"),
    ],
)
def test_the_device_is_an_option_or_an_override(words: list[str], device: str) -> None:
    sections = {
        "model": {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 257},
        "train": {"seq_len": 8, "micro_batch_size": 1, "global_batch_size": 1, "precision": "fp32"},
        "data": {"valid": "corpus"},
    }
    args = parse(["--checkpoint", "runs/a", *words])
    assert evaluation_config(sections, args, 1).train.device == device
