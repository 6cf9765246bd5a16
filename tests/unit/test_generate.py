"""Text with a cache is the text of whole forward passes; draws follow their
distribution; characters appear whole.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.generate import Output, prompts_in, run, text_config
from megacore.config import Config
from megacore.distributed.rank_info import RankInfo
from megacore.errors import CheckpointError, ConfigError, UserError
from megacore.model.stage import Stage
from megacore.tools.text import cache, decoding, sampling
from megacore.tools.text.cache import KeyValueCache
from megacore.tools.text.decoding import Decoder
from megacore.tools.text.sampling import Sampler
from megacore.tools.text.stream import TextStream
from megacore.tools.text.tokenizer import BytesTokenizer, load_tokenizer, train_sentencepiece
from tests import training
from tests.build import mesh_of, model_of, run_of

WINDOW, VOCAB_SIZE = 12, 61
PROMPT = [3, 1, 4, 1, 5]

# Weights so large that every token before changes the logits: at the usual 0.02 a wrong position would hardly
# show.
SIZES = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": VOCAB_SIZE, "init_std": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "tie_embeddings": False,
        "num_kv_heads": 2,
    },
    "scaled": {
        "position": "rope",
        "qk_norm": True,
        "attention_scale": 0.7,
        "logit_scale": 0.5,
        "tie_embeddings": False,
    }
    | {"rope_scaling": {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 8}},
    "eager": {"attention": "eager", "num_kv_heads": 1},
    "fused": {"attention": "fused", "position": "rope"},
}
# fp32 rounds to 6e-8; the cached pass sums the same numbers in other orders, in 3 layers, with logits of
# about 10.
TOLERANCE = 1e-4


def config_of(**model: Any) -> Config:
    """A small resolved config of one process."""
    raw = {"model": SIZES | model, "train": {"seq_len": WINDOW, "precision": "fp32", "device": "cpu"}}
    return run_of(raw)


def decoder_of(config: Config) -> Decoder:
    """The config's model, on this process alone."""
    return Decoder([model_of(config).eval()], mesh_of(config))


def full_logits(model: Stage, tokens: list[int]) -> torch.Tensor:
    """Behind the last token, from a pass over all of them without a cache."""
    with torch.no_grad():
        return model.logits(model.hidden(torch.tensor([tokens])))[-1]


def written_by_full_passes(model: Stage, count: int, sampler: Sampler) -> list[int]:
    """`Decoder.generate` without its cache: every token costs a pass over all that the model sees."""
    tokens, first = list(PROMPT), 0
    for _ in range(count):
        if len(tokens) - first > WINDOW:
            first = len(tokens) - WINDOW // 2
        tokens.append(sampler.choose(full_logits(model, tokens[first:])))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("model", MODELS)
def test_a_cache_does_not_change_the_text(model: str) -> None:
    """Greedy and drawn, to three times the model's positions."""
    decoder = decoder_of(config_of(**MODELS[model]))
    for temperature in (0.0, 1.0):
        samplers = [Sampler(temperature, 20, 0.9, 7, VOCAB_SIZE) for _ in range(2)]
        text = list(decoder.generate(PROMPT, 3 * WINDOW, samplers[0]))
        assert text == written_by_full_passes(decoder.stages[0], 3 * WINDOW, samplers[1])
        assert len(set(text)) > 2, "a text of one token would prove nothing"


def worst_logits(config: Config, pieces: tuple[int, ...]) -> float:
    """The largest difference between logits of cached passes over `pieces` of a text and of whole passes."""
    decoder = decoder_of(config)
    tokens = torch.randint(VOCAB_SIZE, (sum(pieces),), generator=torch.Generator().manual_seed(0)).tolist()
    worst, read = 0.0, 0
    for size in pieces:
        logits = decoder.read(tokens[read : read + size])
        read += size
        assert logits is not None
        worst = max(worst, float((logits - full_logits(decoder.stages[0], tokens[:read])).abs().max()))
    return worst


@pytest.mark.parametrize("model", MODELS)
def test_cached_logits_are_those_of_whole_passes(model: str) -> None:
    """A prompt, single tokens, several at once behind others, and single ones again."""
    assert worst_logits(config_of(**MODELS[model]), (5, 1, 1, 3, 1, 1)) < TOLERANCE


class StartsAnew(KeyValueCache):
    """The fault of positions that are counted from the new tokens alone."""

    held = 0

    def extend(self, *args: Any) -> Any:
        self.length = self.held
        kept = super().extend(*args)
        self.length = 0
        return kept

    def advance(self, new: int) -> None:
        self.held += new


class OffByOne(KeyValueCache):
    """The fault of a count that takes the text for one token shorter: every key
    behind it is one place too early.
    """

    def advance(self, new: int) -> None:
        super().advance(new - (self.length == 0))


def first_to_first(new: int, total: int, device: torch.device) -> torch.Tensor:
    """The fault of a mask whose first query, not its last, lines up with the keys."""
    return torch.ones(new, total, dtype=torch.bool, device=device).tril()


@pytest.mark.parametrize(
    ("module", "name", "fault"),
    [
        (decoding, "KeyValueCache", StartsAnew),
        (decoding, "KeyValueCache", OffByOne),
        (cache, "latest_mask", first_to_first),
    ],
)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_planted_fault_is_caught(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, fault: Any, model: str
) -> None:
    monkeypatch.setattr(module, name, fault)
    assert worst_logits(config_of(**MODELS[model]), (5, 1, 1, 1)) > 100 * TOLERANCE
    assert worst_logits(config_of(**MODELS[model]), (5, 3)) > 100 * TOLERANCE


def test_a_text_ends_with_its_end() -> None:
    """Tokens behind the end of a document would be another one's."""
    decoder = decoder_of(config_of())
    text = list(decoder.generate(PROMPT, 8, Sampler(0.0, 1, 1.0, 0, VOCAB_SIZE)))
    assert (
        list(decoder.generate(PROMPT, 8, Sampler(0.0, 1, 1.0, 0, VOCAB_SIZE), ends=[text[3]]))
        == text[: text.index(text[3]) + 1]
    )


def test_a_long_prompt_is_seen_from_its_end() -> None:
    decoder = decoder_of(config_of())
    greedy = Sampler(0.0, 1, 1.0, 0, VOCAB_SIZE)
    prompt = [i % VOCAB_SIZE for i in range(3 * WINDOW)]
    assert next(decoder.generate(prompt, 1, greedy)) == greedy.choose(
        full_logits(decoder.stages[0], prompt[-WINDOW:])
    )


def test_a_text_that_the_model_sees_the_end_of_begins_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that needs a BOS token needs it wherever it begins to read."""
    decoder = decoder_of(config_of())
    read: list[list[int]] = []
    original = decoder.read

    def recorded(tokens: list[int]) -> torch.Tensor | None:
        read.append(list(tokens))
        return original(tokens)

    monkeypatch.setattr(decoder, "read", recorded)
    greedy = Sampler(0.0, 1, 1.0, 0, VOCAB_SIZE)
    prompt = [7, *(i % VOCAB_SIZE for i in range(2 * WINDOW))]
    text = list(decoder.generate(prompt, WINDOW, greedy, begin=[7]))
    windows = [tokens for tokens in read if len(tokens) > 1]
    assert windows[0] == [7, *prompt[1 - WINDOW :]] and windows[1] == [
        7,
        *[*prompt, text[0]][1 - WINDOW // 2 :],
    ]
    assert all(tokens[0] == 7 and len(tokens) == WINDOW // 2 for tokens in windows[1:]) and len(windows) > 2


@pytest.mark.parametrize(
    ("count", "begin", "expected"),
    [(5, [9], [1, 2, 3, 4]), (3, [9], [9, 3, 4]), (3, [], [2, 3, 4]), (1, [9], [4]), (3, [8, 9], [8, 9, 4])],
)
def test_last_tokens(count: int, begin: list[int], expected: list[int]) -> None:
    assert decoding.last_tokens([1, 2, 3, 4], count, begin) == expected


# --- which token --------------------------------------------------------------------------------------------

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.5, 0.0, 9.0])  # the last is beyond the vocabulary


def frequencies(sampler: Sampler, draws: int) -> torch.Tensor:
    chosen = torch.tensor([sampler.choose(LOGITS) for _ in range(draws)])
    return torch.bincount(chosen, minlength=len(LOGITS)) / draws


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [
        (1.0, 50, 1.0, [0, 1, 2, 3, 4]),
        (2.0, 3, 1.0, [0, 1, 3]),
        (1.0, 50, 0.7, [1, 3]),  # 0.49 + 0.30: the second is needed to reach 0.7
        (1.0, 50, 0.3, [1]),
        (1.0, 1, 1.0, [1]),
        (0.0, 50, 1.0, [1]),
    ],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float, kept: list[int]) -> None:
    """Tokens outside top-k or top-p never come, the others as often as their probabilities say."""
    expected = torch.zeros(len(LOGITS))
    expected[kept] = (LOGITS[kept] / (temperature or 1.0)).exp()
    expected /= expected.sum()
    draws = 4000
    found = frequencies(Sampler(temperature, top_k, top_p, 3, len(LOGITS) - 1), draws)
    assert bool((found[expected == 0] == 0).all())
    # five standard deviations
    assert bool(((found - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt()).all())


def test_a_seed_is_a_text() -> None:
    samplers = [Sampler(1.0, 50, 1.0, seed, 5) for seed in (1, 1, 2)]
    first, again, other = ([sampler.choose(LOGITS) for _ in range(50)] for sampler in samplers)
    assert first == again != other


# --- text while it is made ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    path.write_bytes(train_sentencepiece(Path(__file__).read_text(encoding="utf-8").split("\n"), 400))
    return str(path)


def pieces_of(tokenizer: Any, tokens: list[int]) -> Iterator[str]:
    stream = TextStream(tokenizer)
    yield from map(stream.push, tokens)
    yield stream.end()


def test_text_appears_in_whole_characters(sentencepiece: str) -> None:
    """A character of several tokens must not appear as replacement signs, nor a space
    between words be lost.
    """
    text = "  two words, naïve 日本 😀\n"
    for tokenizer in (BytesTokenizer(), load_tokenizer(sentencepiece)):
        pieces = list(pieces_of(tokenizer, tokenizer.encode(text).tolist()))
        assert "".join(pieces) == text and len(pieces) > 10
    assert list(pieces_of(BytesTokenizer(), [97, 0xC3])) == ["a", "", "\ufffd"]


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    raw = {"model": SIZES | {"vocab_size": 256}, "train": {"seq_len": WINDOW}, "data": {"tokenizer": "bytes"}}
    return str(training.write_weights(tmp_path_factory.mktemp("weights"), run_of(raw)))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--checkpoint", "nowhere"], "checkpoint error: nowhere: holds no checkpoint"),
        (["--prompt", ""], "config error: --prompt: has no tokens"),
        (["--prompt-file", "nowhere.txt"], "data error: nowhere.txt: cannot be read"),
        (
            ["--prompt", "a", "--prompt-file", "b"],
            "config error: --prompt-file: not allowed with argument --prompt",
        ),
        (["--prompt", "a", "--prompt", ""], "config error: --prompt: has no tokens"),
        (["--prompt", "\udc80"], "config error: --prompt: '\\udc80' is not usable (UTF-8 text)"),
        (["--prompts", "EMPTY.txt"], "data error: EMPTY.txt: has no prompt"),
        (["--prompts", "BAD.jsonl"], "data error: BAD.jsonl: line 3 has no prompt"),
        (
            ["--prompts", "EMPTY.txt", "--prompt", "b"],
            "config error: --prompt: not allowed with argument --prompts",
        ),
        (
            ["--seed", str(2**63 - 2), "--samples", "3"],
            "config error: --seed: 9223372036854775806 is not usable",
        ),
        (["--top-p", "0"], "config error: --top-p: 0.0 is not usable"),
        (["parallel.tensor=2"], "config error: parallel: tensor 2"),
        (["model.hidden_size=64"], "checkpoint error: CHECKPOINT: was written with model.hidden_size=32"),
        (
            ["model.max_positions=24"],
            "checkpoint error: CHECKPOINT: was written with model.max_positions=12 (the config says 24)",
        ),
        (
            ["--tokenizer", "SENTENCEPIECE"],
            "config error: --tokenizer: SENTENCEPIECE is of another kind than the run's bytes",
        ),
        (
            ["--tokenizer", "SENTENCEPIECE", "data.tokenizer=null"],
            "config error: --tokenizer: SENTENCEPIECE has 400 tokens, and the",
        ),
        (["data.tokenizer=null"], "config error: --tokenizer: the run names no tokenizer"),
    ],
)
def test_a_mistake_is_one_line(
    checkpoint: str, sentencepiece: str, tmp_path: Path, arguments: list[str], line: str
) -> None:
    names = {"CHECKPOINT": checkpoint, "SENTENCEPIECE": sentencepiece}
    for name, content in (("EMPTY.txt", " \n\n"), ("BAD.jsonl", '"a"\n\n{"text": "b"}\n')):
        (tmp_path / name).write_text(content)
        names[name] = str(tmp_path / name)
    for name, path in names.items():
        arguments, line = [a.replace(name, path) for a in arguments], line.replace(name, path)
    with pytest.raises(UserError) as raised:
        run(
            [*(["--checkpoint", checkpoint] if "--checkpoint" not in arguments else []), *arguments],
            RankInfo(),
        )
    assert str(raised.value).startswith(line) and "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_diverged_checkpoint_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float, temperature: str
) -> None:
    """Sampling would end in a traceback about probabilities, and the likeliest token would be token 0."""
    raw = {"model": SIZES | {"vocab_size": 256}, "train": {"seq_len": WINDOW}, "data": {"tokenizer": "bytes"}}
    path = training.write_weights(tmp_path, run_of(raw), value=value)
    arguments = ["--checkpoint", str(path), "--temperature", temperature, "--device", "cpu"]
    with pytest.raises(CheckpointError) as raised:
        run(arguments, RankInfo(guest=True))
    wrong = "its logits are not finite: the run has diverged"
    assert str(raised.value) == f"checkpoint error: {path}: {wrong} (an earlier checkpoint)"
    assert capsys.readouterr().out == ""


def test_a_token_may_be_banned() -> None:
    """A custom model may set a logit to minus infinity, which has not diverged."""
    logits = torch.tensor([float("-inf"), 1.0, float("-inf")])
    for temperature in (0.0, 1.0):
        assert Sampler(temperature, 3, 1.0, 0, 3).choose(logits) == 1
    assert Sampler(1.0, 3, 1.0, 0, 3).choose(torch.full((3,), float("-inf"))) == sampling.NOT_FINITE


def test_a_prompt_appears_with_its_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    """A layer may refuse the layout in the first pass, as a layer of your own does on context
    ranks: then no text has begun.
    """
    output = Output(RankInfo(), 2, None)
    output.begin("abc", 0)
    assert capsys.readouterr().out == ""
    output.add("d")
    output.add("e")
    output.end()
    assert capsys.readouterr().out == "--- text 1 of 2\nabcde\n"


def test_lines_of_json_go_to_a_file_or_replace_the_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"prompt": "abc", "seed": 7, "text": "de"}
    for target in (str(tmp_path / "texts.jsonl"), "-"):
        output = Output(RankInfo(), 1, target)
        output.begin("abc", 7)
        output.add("de")
        output.end()
        output.write()
        printed = capsys.readouterr().out
        assert printed == "abcde\n" if target != "-" else json.loads(printed) == line
    assert json.loads((tmp_path / "texts.jsonl").read_text()) == line


def test_context_ranks_are_refused_for_a_latent_before_anything_is_loaded() -> None:
    """They used to load all weights first."""
    latent = {
        "kv_rank": 8,
        "plain_size": 4,
        "head_size": 4,
        "value_size": 4,
        "position": "rope",
        "norm": "rmsnorm",
        "bias": False,
    }
    sections = {"model": SIZES | latent, "train": {"seq_len": WINDOW}, "data": {}}
    assert text_config(sections, ["parallel.tensor=2"], "cpu", 2).parallel.tensor == 2
    with pytest.raises(
        ConfigError, match="parallel.context: with latent attention a text is written on one context rank"
    ):
        text_config(sections, ["parallel.context=2"], "cpu", 2)


def test_only_a_newline_ends_a_prompt() -> None:
    """JSON may hold U+2028 and U+0085 as they are, which Python counts as ends of lines."""
    assert prompts_in("a.jsonl", '"one\u2028two"\r\n\n{"prompt": "a\x85b"}\n') == ["one\u2028two", "a\x85b"]
    assert prompts_in("a.txt", "one\u2028two\r\nthree") == ["one\u2028two", "three"]


@pytest.mark.parametrize(
    ("asked", "there", "taken"), [([], True, "cuda"), ([], False, "cpu"), (["--device", "cpu"], True, "cpu")]
)
def test_it_takes_a_gpu_if_there_is_one(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, asked: list[str], there: bool, taken: str
) -> None:
    """A large model would write on the processor, beside an idle GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)

    def refuse(config: Config, place: RankInfo) -> None:
        raise ConfigError("device", config.train.device, "")

    monkeypatch.setattr("megacore.tools.machine.device.take_device", refuse)
    with pytest.raises(ConfigError, match=f"device: {taken} "):
        run(["--checkpoint", checkpoint, *asked], RankInfo())


def test_as_many_ranks_as_the_layout(checkpoint: str) -> None:
    """Ranks beyond the layout would each write a text of their own."""
    with pytest.raises(UserError, match="config error: parallel: tensor 2 × pipeline 1, and 4 ranks started"):
        run(["--checkpoint", checkpoint, "parallel.tensor=2"], RankInfo(rank=0, world_size=4))
