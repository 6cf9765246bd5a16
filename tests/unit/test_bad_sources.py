"""`model.source` as a clumsy user may write it: one line that names the file, its line and what is wrong, and
nothing begins. See test_bad_inputs.py.
"""

from pathlib import Path

import pytest

from tests import forks
from tests.bad_inputs import Row, config, rows
from tests.conftest import Refused

RIGHT = forks.documented()
BLOCK = "class Block:\n    def __init__(self, *_): ...\n    def forward(self, x, context): ...\n"
SETTINGS = f"from megacore.config.schema import Count, ModelConfig\n{BLOCK}class Settings(ModelConfig):\n    "


def edited(before: str, after: str) -> str:
    assert RIGHT.count(before) == 1
    return RIGHT.replace(before, after)


SOURCES = {
    "right": RIGHT,
    "syntax": "x = 1\nclass Block(:\n",
    "raises": "import torch\n\nx = 1 / 0\n",
    "exits": "import sys\nsys.exit(0)\n",
    "imports": "import no_such_package\n",
    "neighbour": "import right\n",
    "empty": "",
    "no_forward": "class Block:\n    def __init__(self, *_): ...\n",
    "few_arguments": "class Block:\n    def __init__(self, index): ...\n    def forward(self, x, "
    "context): ...\n",
    "other_forward": "class Block:\n    def __init__(self, *_): ...\n    def forward(self, x): ...\n",
    "no_section": f"class Settings: ...\n{BLOCK}",
    "no_default": SETTINGS + "window: Count\n",
    "bad_default": SETTINGS + "window: Count = 0\n",
    "no_json": SETTINGS + "model_config = {'arbitrary_types_allowed': True}\n    window: object = object()\n",
    "not_annotated": SETTINGS + "window = 3\n",
    "validator": "from pydantic import model_validator\n"
    + SETTINGS
    + """window: Count = 3
    @model_validator(mode='after')
    def even(self):
        if self.window == 5:
            raise ValueError('window 5 is odd')
        return self.nowhere if self.window == 7 else self
""",
    "constructor": edited("        self.index = index", "        raise KeyError('rope')"),
    "content": edited(
        "        return self.down(", "        assert x.sum().item() < 1e9\n        return self.down("
    ),
    "no_module": edited("class Block(nn.Module)", "class Block(dict)"),
    "plain_weight": edited(
        "        self.index = index", "        self.index, self.gate = index, nn.Linear(3, 3)"
    ),
    "few_layers": f"{RIGHT}\nfrom megacore.model.gpt import gpt\ndef layers(config):\n    return "
    "gpt(config, Block)[::2]\n",
    "no_layers": f"{RIGHT}\ndef layers(config):\n    return None\n",
    "own_head": RIGHT
    + """
from megacore.model.gpt import gpt
from megacore.model.head import Head
from megacore.model.layers import LayerSpec
def layers(config):
    return [*gpt(config, Block)[:-1], LayerSpec("head", Head)]
""",
    "parts": "PARTS = ['mlp']\n\ndef build(config): ...\n",
    "parts_alone": "PARTS = {'mlp': 'region'}\n",
    "build_alone": "def build(config): ...\n",
    "unread": f"{RIGHT}\nfrom megacore.model.gpt import gpt\nBlock.reads = ('hidden', 'memory')\n",
}


def line_of(name: str) -> int:
    at = ".item()" if name == "content" else "raise "
    return SOURCES[name][: SOURCES[name].index(at)].count("\n") + 1


def source(name: str, *words: str) -> tuple[str, ...]:
    return config(f"model.source=@{name}.py", *words)


LINES: list[Row] = [
    *(
        ("pretrain", source(name, "--print-config"), f"config error: model.source: {line}")
        for name, line in (
            (
                "nowhere",
                "cannot read @nowhere.py: No such file or directory (a Python file with a class Block",
            ),
            ("folder.png/x", "cannot read @folder.png/x.py: No such file"),
            ("binary", "@binary.py is not UTF-8 text"),
            ("pipe", "cannot read @pipe.py: Not a plain file"),
            ("syntax", "@syntax.py, line 2: SyntaxError: invalid syntax"),
            ("raises", "@raises.py, line 3: ZeroDivisionError: division by zero"),
            ("exits", "@exits.py, line 2: SystemExit: 0"),
            ("imports", "@imports.py, line 1: ModuleNotFoundError: No module named 'no_such_package'"),
            ("neighbour", "@neighbour.py, line 1: ModuleNotFoundError: No module named 'right'"),
            ("empty", "@empty.py has no Block"),
            ("no_forward", "@no_forward.py: Block.forward cannot be called"),
            (
                "few_arguments",
                "@few_arguments.py: Block cannot be called: too many positional arguments (Block(index, "
                "config, mesh",
            ),
            (
                "other_forward",
                "@other_forward.py: Block.forward cannot be called: too many positional arguments "
                "(Block.forward(self, x, ",
            ),
            (
                "no_section",
                "@no_section.py: Settings is no section (class Settings(megacore.config.schema.ModelConfig))",
            ),
            ("no_default", "@no_default.py: Settings.window has no valid default: field required"),
            (
                "bad_default",
                "@bad_default.py: Settings.window has no valid default: input should be greater than 0",
            ),
            ("no_json", "@no_json.py, Settings: PydanticSerializationError"),
            ("not_annotated", "@not_annotated.py, line 5: PydanticUserError"),
            ("parts", "@parts.py: PARTS is not a table (a dict of texts, such as PARTS = {"),
            ("parts_alone", "@parts_alone.py has PARTS, and nothing builds the module that it divides"),
            (
                "build_alone",
                "@build_alone.py has build, and no PARTS that says which parameters ranks divide",
            ),
        )
    ),
    ("pretrain", config("model.source=", "--print-config"), 'config error: model.source: "" is not valid'),
    (
        "pretrain",
        config("model.source=3", "--print-config"),
        "config error: model.source: 3 is not valid: input should be a valid string",
    ),
    ("pretrain", config('model.source="a\\u0000b"'), "config error: model.source: "),
    (
        "pretrain",
        source("right", "model.windows=3"),
        "config error: model.windows: unknown key (did you mean model.window?)",
    ),
    (
        "pretrain",
        source("right", "model.window=0"),
        "config error: model.window: 0 is not valid: input should be greater than 0 (a whole",
    ),
    (
        "pretrain",
        source("right", 'model.window="4"'),
        'model.window: "4" is not valid: input should be a valid integer (a whole number ab',
    ),
    ("pretrain", config("model.reach=4"), "config error: model.reach: unknown key"),
    (
        "pretrain",
        source("right", "model.source_digest=abc"),
        "config error: model.source_digest: @right.py has the digest ",
    ),
    (
        "pretrain",
        source("right", "model.source_digest=3"),
        "config error: model.source_digest: @right.py has the digest ",
    ),
    (
        "pretrain",
        config("model.source_digest=abc"),
        "config error: model.source_digest: there is no model.source of which",
    ),
    (
        "pretrain",
        source("validator", "model.window=5"),
        "config error: model: window 5 is odd (what Settings of @validator.py takes)",
    ),
    (
        "pretrain",
        source("validator", "model.window=7"),
        "@validator.py, line 12, validating: AttributeError: ",
    ),
    *(
        (script, source(name), f"config error: model.source: {line}")
        for script in ("pretrain", "plan")
        for name, line in (
            ("constructor", f"@constructor.py, line {line_of('constructor')}, block 0: KeyError: 'rope'"),
            ("no_module", "@no_module.py, block 0: TypeError: Block is no torch.nn.Module"),
            (
                "few_layers",
                "@few_layers.py, layers: ValueError: 2 of them; model.num_layers=2 counts all but the "
                "first and the last",
            ),
            ("no_layers", "@no_layers.py, layers: TypeError"),
            (
                "unread",
                "@unread.py, layers: ValueError: layer blocks.0 reads memory, which no layer before it "
                "writes",
            ),
            (
                "plain_weight",
                "@plain_weight.py: gate.weight of block 0 does not say which part of the whole tensor it "
                "is (a layer of ",
            ),
        )
    ),
    (
        "plan",
        source("own_head", "model.z_loss=0.1"),
        "config error: model.z_loss: no layer of @own_head.py declares the loss z_loss",
    ),
    (
        "plan",
        source("content", "--gpu", "h100"),
        "config error: --gpu: the layers of model.source do not run on tensors without",
    ),
    (
        "plan",
        source("content", "--search", "--world", "8"),
        "config error: --search: the layers of model.source do not run on tensors ",
    ),
    (
        "plan",
        source("content", "parallel.schedule=auto", "parallel.pipeline=2"),
        f"config error: model.source: @content.py, line {line_of('content')}, blocks.0 on tensors without "
        "content: RuntimeError: ",
    ),
    (
        "generate",
        ("--checkpoint", "@run", "--source", "@right.py"),
        "checkpoint error: @run/checkpoints/step_00000003: its model has no",
    ),
    (
        "evaluate",
        ("--checkpoint", "@run", "--source", "@right.py"),
        "checkpoint error: @run/checkpoints/step_00000003: its model has no",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def written(tree: Path) -> None:
    for name, text in SOURCES.items():
        (tree / f"{name}.py").write_text(text)
    (tree / "binary.py").write_bytes(b"\xff\xfe\0")
    (tree / "pipe.py").symlink_to(tree / "pipe")


@pytest.mark.parametrize(("script", "arguments", "line"), rows(LINES))
def test_a_source_that_is_wrong_is_refused_in_one_line(
    script: str, arguments: tuple[str, ...], line: str, refused: Refused
) -> None:
    refused(script, arguments, line)
