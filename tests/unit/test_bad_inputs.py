"""What a clumsy or hostile user may give a script: one line that names it, at once, and nothing written.

Here configs and contents.

Scripts end with status 2 and the line of a `UserError`; here their bodies are called, and must raise one.
What hangs, takes memory without end or raises anything else fails. `tests/bad_inputs.py` says what a row is;
its neighbours test_bad_… have paths and numbers.
"""

import pytest

from tests.bad_inputs import EXPORT, HUGE, PLAIN, TEXT, Row, config, rows
from tests.conftest import Refused

# Configs, which every script reads alike.
CONFIGS: list[Row] = [
    *(
        (
            script,
            (*before, "--config", f"@{name}", *after),
            f"config error: --config: cannot read @{name}: Not a plain file",
        )
        for name in ("pipe", "zero")
        for script, before, after in (
            ("plan", (), ()),
            ("pretrain", (), ()),
            ("verify", (), ()),
            ("samples", (), ("--step", "1")),
            ("supervise", ("torchrun",), ()),
            ("drill", (), ("--fault", "kill:step=2")),
        )
    ),
    ("plan", ("--config", "@folder.png"), "cannot read @folder.png: Is a directory"),
    ("plan", ("--config", "@loop"), "cannot read @loop: Too many levels of symbolic links"),
    ("plan", ("--config", ""), "config error: --config: cannot read : No such file"),
    ("plan", ("--config", "@latin.json"), "@latin.json is not UTF-8 text"),
    ("plan", ("--config", "@deep.json"), "config error: --config: @deep.json cannot be read"),
    ("pretrain", config("--train.steps"), "config error: train.steps: has no value (train.steps=VALUE)"),
    (
        "pretrain",
        config("train.steps=1" + "0" * 23),
        "is not valid: input should be less than or equal to 9007199254740992",
    ),
    (
        "pretrain",
        config(f"train.steps={2**53}", "train.global_batch_size=1024"),
        "samples cannot be counted in 64 bits (at most",
    ),
    (
        "pretrain",
        config(f"model.hidden_size={HUGE}"),
        "equal to 1048576 (a whole number above 0 and at most 1,048,576)",
    ),
    (
        "pretrain",
        config("model.num_layers=1" + "0" * 400),
        "… is not valid: input should be less than or equal to 9007199254740992",
    ),
    (
        "plan",
        config("model.hidden_size=1048576", "model.num_heads=1048576", "model.head_size=1024"),
        "tensor of 3.38e+15 elements",
    ),
    (
        "plan",
        config("train.seq_len=2000000000", "train.micro_batch_size=4"),
        "is 8,000,000,000 tokens (at most 2,147,483,648)",
    ),
    (
        "plan",
        config("pipeline.schedule=gpipe"),
        "config error: pipeline.schedule: unknown key (did you mean parallel.schedule or",
    ),
    ("plan", config("x" * 5000 + ".y=1"), "xx…xx"),
    ("plan", ("--config", "@" + "x" * 5000), "File name too long (a JSON file"),
    (
        "plan",
        ("--config", "@twice.json"),
        "config error: --config: @twice.json cannot be read: the key steps twice in one object",
    ),
    (
        "plan",
        ("--config", "@twice_section.json"),
        "@twice_section.json cannot be read: the key train twice in one object",
    ),
    (
        "plan",
        config("engine.kind=deepspeed", "engine.config=@twice.json"),
        "@twice.json is no JSON: the key steps twice in one object",
    ),
    (
        "plan",
        config('engine.config={"a": 1, "a": 2}'),
        "config error: engine.config: cannot be read: the key a twice in one object",
    ),
    ("plan", config("parallel.schedule=zb_h9"), "(1f1b or gpipe or interleaved or zb_h1 or"),
    (
        "plan",
        config("--world", "7", "parallel.tensor=2"),
        "= 6 ranks, but there are 7 (a multiple of tensor × pipeline = 2 ranks)",
    ),
    *(
        (script, config(*words), f"config error: {line}")
        for script in ("plan", "pretrain")
        for words, line in (
            (
                ("model.parametrization=up",),
                "model.parametrization: \"up\" is not valid: input should be 'standard' or 'mup'",
            ),
            (
                ("model.parametrization=mup",),
                "model.base_width: mup has no width at which its rates are those of the config (the "
                "hidden_size",
            ),
            (
                ("model.base_width=12",),
                "model.base_width: only model.parametrization=mup reads it (null, or mup)",
            ),
            (
                ("model.parametrization=mup", "model.base_width=0"),
                "model.base_width: 0 is not valid: input should be greater than",
            ),
            (("model.parametrization=mup", f"model.base_width={HUGE}"), "model.base_width: 1"),
            (
                ("model.parametrization=mup", "model.base_width=13"),
                "model.base_width: 13 would have 2.167 heads of head_size 6 (a width with",
            ),
            (
                ("model.parametrization=mup", "model.base_width=12", "model.base_layers=-1"),
                "model.base_layers: -1 is not valid",
            ),
        )
    ),
    (
        "coordinates",
        ("--config", "@config.json", "--widths", "12"),
        "config error: --widths: a slope needs two widths or more (such as",
    ),
    (
        "coordinates",
        ("--config", "@config.json", "--widths", "12,1" + "0" * 30),
        "0' is no width (whole numbers from 1 to 65536",
    ),
    (
        "coordinates",
        ("--config", "@config.json", "--widths", "12,13"),
        "--widths: 13 would have 2.167 heads of head_size 6 (widths with",
    ),
    (
        "coordinates",
        ("--config", "@config.json", "--steps", "1e9"),
        "config error: --steps: invalid int value: '1e9'",
    ),
    (
        "coordinates",
        ("--config", "@config.json", "--limit", "-1"),
        "config error: --limit: -1.0 is no slope (a number above 0",
    ),
    (
        "coordinates",
        ("--config", "@config.json", "--plot", "@nowhere/x.png"),
        "config error: --plot: cannot write @nowhere/x.png: No such file or directory",
    ),
    ("coordinates", ("--config", "@pipe"), "config error: --config: cannot read @pipe: Not a plain file"),
    (
        "pretrain",
        config("data.packing=best"),
        "\"best\" is not valid: input should be 'none' or 'best_fit' (none or best_fit)",
    ),
    *(
        (script, config(*words), f"config error: {line}")
        for script in ("plan", "pretrain")
        for words, line in (
            (
                ("parallel.context=3",),
                "train.seq_len: 16 is not a multiple of 2 × parallel.context 6 (12 or 18 would be)",
            ),
            (
                ("parallel.context=two",),
                'parallel.context: "two" is not valid: input should be a valid integer',
            ),
            (
                ("parallel.context=8", "parallel.context_method=ulysses"),
                "parallel.context_method: ulysses cannot deal 4 heads of a tensor ra",
            ),
            (
                ("parallel.context=2", "parallel.context_method=rings"),
                'parallel.context_method: "rings" is not valid',
            ),
            (
                ("parallel.context=2", "engine.kind=deepspeed"),
                "parallel.context: the deepspeed engine counts a batch by its data ranks",
            ),
            (
                ("data.document_mask=maybe",),
                'data.document_mask: "maybe" is not valid: input should be a valid boolean (true or false)',
            ),
        )
    ),
    (
        "pretrain",
        config('data.train=[[0,"@data"]]'),
        "config error: data.train: weight 0 is not valid: input should be greater than",
    ),
    (
        "pretrain",
        config('data.train=[[1,"@data"],[1,3]]'),
        "config error: data.train: prefix 3 is not valid: input should be a valid str",
    ),
    (
        "pretrain",
        config('data.train=[[1e-320,"@data"],[1,"@data"]]'),
        "config error: data.train: weight 1e-320 is not valid",
    ),
    ("pretrain", config('data.train="a\\u0000b"'), "config error: data.train: holds a NUL"),
    ("pretrain", config('data.train=[[1,"a\\u0000b"]]'), "config error: data.train: holds a NUL"),
]

CONTENTS: list[Row] = [
    *(
        (
            "pretrain",
            config(f"data.train=@data{file}"),
            f"data error: @data{file}: names one file, and a corpus has two (their prefix, ",
        )
        for file in (".bin", ".idx")
    ),
    *(
        ("pretrain", config(f"data.train=@{name}"), f"data error: @{name}{file}: ")
        for name, file in (
            ("pipe_bin", ".bin"),
            ("pipe_idx", ".idx"),
            ("side_folder", ".json"),
            ("side_pipe", ".json"),
            ("side_deep", ".json"),
            ("endless", ".idx"),
            ("mask_short", ".mask.bin"),
            ("mask_pipe", ".mask.bin"),
            ("mask_long", ".mask.bin"),
            ("mask_other", ".mask.bin"),
        )
    ),
    *(
        (
            "pretrain",
            config(f"data.train=@{name}", "data.document_mask=true"),
            f"data error: @{name}.idx: its documents do not follow one a",
        )
        for name in ("ends_negative", "ends_beyond")
    ),
    *(
        ("prepare", ("--input", f"@{talk}", *TEXT[2:], "bytes", "--chat", *more), line)
        for talk, more, line in (
            (
                "chat_role.jsonl",
                PLAIN,
                "data error: @chat_role.jsonl: line 1 has the unknown role 'bot' in message 1 (one of "
                "system, ",
            ),
            (
                "chat_empty.jsonl",
                PLAIN,
                "data error: @chat_empty.jsonl: line 1 has an empty answer, message 1",
            ),
            ("chat_none.jsonl", PLAIN, "data error: @chat_none.jsonl: line 1 has no list of messages"),
            ("chat_unanswered.jsonl", PLAIN, "line 1 has no answer: no message is of the role assistant"),
            (
                "chat_right.jsonl",
                ("--template", "@fails.jinja"),
                "line 1 makes @fails.jinja fail: roles must alternate",
            ),
            (
                "chat_right.jsonl",
                ("--template", "@broken.jinja"),
                "data error: @broken.jinja: is no template: Unexpected end of template",
            ),
            (
                "chat_right.jsonl",
                ("--template", "@pipe"),
                "data error: @pipe: cannot be read: Not a plain file",
            ),
            ("chat_right.jsonl", (), "config error: --template: there is no chat template beside bytes"),
            (
                "chat_broken.jsonl",
                PLAIN,
                "data error: @chat_broken.jsonl: line 2 is not JSON (Expecting value)",
            ),
            ("deep.jsonl", PLAIN, "data error: @deep.jsonl: line 1 has no list of messages"),
            ("text.txt", PLAIN, "data error: @text.txt: holds no conversations"),
        )
    ),
    (
        "prepare",
        (*TEXT, "bytes", "--template", "@plain.jinja"),
        "config error: --template: only conversations have a template",
    ),
    (
        "prepare",
        ("--input", "@chat_right.jsonl", *TEXT[2:], "bytes", "--chat", *PLAIN, "--text-key", "a"),
        "config error: --text-key: con",
    ),
    (
        "prepare",
        ("--input", "@chat_right.jsonl", *TEXT[2:], "sentencepiece:300", "--chat"),
        "config error: --tokenizer: sentencepiece:300",
    ),
    (
        "prepare",
        ("--input", "@deep.jsonl", *TEXT[2:], "bytes"),
        "data error: @deep.jsonl: line 2 has brackets nested too deep",
    ),
    (
        "prepare",
        ("--input", "@digits.jsonl", *TEXT[2:], "bytes"),
        "@digits.jsonl: line 1 holds a number of too many digits",
    ),
    (
        "prepare",
        ("--input", "@pipe", *TEXT[2:], "bytes"),
        "data error: @pipe: cannot be read: Not a plain file",
    ),
    ("prepare", ("--input", "", *TEXT[2:], "bytes"), "data error: ``: missing (a file"),
    (
        "prepare",
        (*TEXT, "bites"),
        "data error: bites: cannot be read: No such file or directory (bytes, a FILE.model, a tok",
    ),
    (
        "prepare",
        ("--input", "@text.txt", "--output", "/proc/x", "--tokenizer", "bytes"),
        "data error: /proc/x: cannot be written: ",
    ),
    ("prepare", (*TEXT, "@zero"), "data error: @zero: cannot be read: Not a plain file"),
    (
        "prepare",
        ("--input", "@text.txt", "--output", "@out/x", "--tokenizer", "bytes", "--workers", HUGE),
        "config error: --workers: ",
    ),
    *(
        (script, (*words, f"@run_{name}", *more), line)
        for name, line in (
            ("layers", "config error: model.num_layers: 100,000,000 layers are"),
            ("more_layers", "too few for model.num_layers=10000"),
        )
        for script, words, more in (
            ("generate", ("--checkpoint",), ()),
            ("evaluate", ("--checkpoint",), ()),
            ("checkpoint", ("export",), EXPORT[2:]),
        )
    ),
    *(
        (script, ("--checkpoint", f"@run_{name}"), line)
        for script in ("generate", "evaluate")
        for name, line in (
            (
                "positions",
                "tensor model/position has shape (16, 24), and the model of this config (2147483648, 24)",
            ),
            ("wide", "config error: model.hidden_size: 4611686018427387904 is not valid"),
            ("bare", "does not hold the run's config"),
            ("text", "does not hold the run's config"),
            ("nul", "config error: data.tokenizer: holds a NUL"),
        )
    ),
    (
        "speculate",
        ("--checkpoint", "@run"),
        "its model has no layer that guesses (a run of configs/forks/multi_token.json)",
    ),
    *(
        (
            "checkpoint",
            ("info", f"@run_{name}"),
            "none of its 1 checkpoints is whole; in the newest, step_00000003, ",
        )
        for name in ("folder", "link", "pipe")
    ),
    *(
        ("checkpoint", ("import", f"@{path}", "--format", kind, "--output", "@out"), line)
        for path, kind, line in (
            ("hf_layers", "hf", "has 1 tensors, too few for 10000 layers"),
            ("hf_kinds", "hf", "layer_types is 3"),
            ("hf_kinds2", "hf", "layer_types has other layers"),
            ("hf_wide", "hf", "above 0 and at most"),
            ("hf_nan", "hf", "model.norm_eps"),
            ("hf_theta", "hf", "model.rope_theta"),
            ("hf_names", "hf", "has no weight_map from tensors to files of this folder"),
            ("nano_layers.pt", "nanogpt", "has 1 tensors, too few for 10000 layers"),
            ("nano_wide.pt", "nanogpt", "above 0 and at most"),
            ("pipe", "nanogpt", "checkpoint error: @pipe: cannot be read: Not a plain file"),
        )
    ),
]


@pytest.mark.parametrize(("script", "arguments", "line"), rows(CONFIGS, CONTENTS))
def test_bad_input_is_one_line(script: str, arguments: tuple[str, ...], line: str, refused: Refused) -> None:
    """A traceback, silence, or a result that is none in place of one clear line."""
    refused(script, arguments, line)
