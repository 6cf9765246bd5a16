"""Plain modules whose table or code is wrong are rejected where their layers are built or first run, with the
place of the mistake; and first weights are those that the module's own code draws.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from megacore.config import Config
from megacore.errors import ConfigError
from megacore.files import ROOT
from megacore.model.batch import Microbatch
from megacore.model.plain.build import module_of, plain_model, seeded
from megacore.model.plain.outline import order_of
from megacore.model.plain.parts import Parts, Role, parts_of_plan
from megacore.model.stage import Stage
from tests.build import model_of, run_of
from tests.plain_modules import write_example, write_folder

Edit = tuple[str, str]
SMALL = (
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.vocab_size=32",
    "train.seq_len=8",
    "train.micro_batch_size=2",
    "train.global_batch_size=2",
    "train.device=cpu",
    "train.precision=fp32",
)
LOOP = "        for block in self.blocks:\n            x = block(x)\n"
END = "return self.head(self.norm(x))"
MLP = "return x + self.mlp(self.norm2(x))"
NORMS = "self.norm1, self.norm2 ="
TIED = "        self.head.weight = self.tokens.weight\n"
BEFORE = "x = x + self.attention(self.norm1(x))"
BLOCK_ARGUMENTS = "def forward(self, x: Tensor) -> Tensor:\n        x = x + "
SDPA = "F.scaled_dot_product_attention(q, k, v, is_causal=True)"
OUTPUT = "self.output = nn.Linear(width, width)"


def config_of(folder: Path, edits: tuple[Edit, ...], *overrides: str) -> Config:
    source = f"model.source={write_example(folder, *edits)}"
    return run_of(ROOT / "configs/forks/plain_gpt.json", source, *SMALL, *overrides)


def batch_of(config: Config) -> Microbatch:
    shape = (2, config.train.seq_len)
    tokens = torch.arange(shape[0] * shape[1]).view(shape) % config.model.vocab_size
    return Microbatch(tokens, tokens.roll(-1, 1))


def first_pass(config: Config) -> Stage:
    """Build the layers of a config and run them once, as the first microbatch of a run does."""
    model = model_of(config)
    sums = model({}, batch_of(config))[1]
    torch.stack(list(sums.values())).sum().backward()
    return model


TABLES: dict[str, tuple[Edit, str]] = {
    "no entrance": (
        ('    "attention": "region",\n', ""),
        "attention.qkv is a column outside of all regions",
    ),
    "no exit": (('    "attention.output": "row",\n', ""), "attention is a region without a row"),
    "a region that divides nothing": (
        ('"mlp": "region",\n    "mlp.0": "column",\n    "mlp.2": "row",\n', '"mlp": "sum",\n'),
        "mlp is a sum, and no rank has a part",
    ),
    "divided in a whole region": (('"mlp": "region"', '"mlp": "whole"'), "mlp.0 is a column in a whole"),
    "a region in a region": (
        ('"mlp": "region"', '"*": "region"'),
        "'mlp.0' is 'column' in the table, and patterns before it",
    ),
    "regions nested by their places": (
        ('"mlp": "region"', '"mlp": "region",\n    "mlp.1": "whole"'),
        "mlp.1 is a whole in a region",
    ),
    "a pattern that fits nothing": (
        ('"mlp.0"', '"mpl.0"'),
        "'mpl.0' is 'column' in the table, and no module",
    ),
    "a module's role for its parameter": (('"mlp.0"', '"mlp.0.weight"'), "'mlp.0.weight' .* no module of a"),
    "a parameter's role for a module": (
        ('"mlp.0": "column"', '"mlp.0": "split 0"'),
        "no parameter of a block",
    ),
    "a role that does not exist": (
        ('"mlp.0": "column"', '"mlp.0": "colwise"'),
        "'mlp.0' is 'colwise', which",
    ),
    "divides no integer": (
        ('"attention.width"', '"attention.qkv"'),
        "'attention.qkv' is 'divide' .* no integer",
    ),
    "a layer that is not linear": (
        ('"mlp.0": "column"', '"mlp.1": "column"'),
        "mlp.1 is a GELU, and a column",
    ),
    "blocks elsewhere": (("PARTS = {", "PARTS = {\n    'norm': 'blocks',"), "no list of blocks at 'norm'"),
    "a head elsewhere": (("PARTS = {", "PARTS = {\n    'norm': 'head',"), "'norm' is not the one Linear"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_wrong_table_is_rejected_when_layers_are_built(name: str, tmp_path: Path) -> None:
    """In every layout, also in those with one tensor rank, where it would change nothing."""
    edit, words = TABLES[name]
    with pytest.raises(ConfigError, match=words) as raised:
        model_of(config_of(tmp_path, (edit,)), "meta")
    assert raised.value.where == "model.source" and "docs/models.md" in raised.value.right


MODULES: dict[str, tuple[tuple[Edit, ...], str]] = {
    "dropout": (((", nn.GELU(), ", ", nn.Dropout(0.1), "),), r"blocks.0.mlp.1 drops out 0.1"),
    "dropout in the code around blocks": (
        ((LOOP, f"        x = F.dropout(x, 0.1)\n{LOOP}"),),
        "GPT draws random numbers",
    ),
    "tied in the config alone": (((TIED, ""),), "head.weight and tokens.weight are two"),
    "a norm that blocks share": (
        ((TIED, f"{TIED}        self.blocks[1].norm2 = self.blocks[0].norm2\n"),),
        "blocks.1.norm2.weight is blocks.0.norm2.weight",
    ),
    "one block, twice": (
        (("(Block(width, heads) for _ in range(layers))", "([Block(width, heads)] * layers)"),),
        "blocks.1.norm1.weight is blocks.0.norm1.weight",
    ),
    "a norm before and after the blocks": (
        ((LOOP, f"        x = self.norm(x)\n{LOOP}"),),
        "norm is called after 0, 2 blocks",
    ),
    "a norm that is never called": (((END, "return self.head(x)"),), "norm is called never"),
    "a skip connection": (
        ((LOOP, "        for block in self.blocks:\n            x = x + block(x)\n"),),
        "GPT computes between blocks",
    ),
    "a skip connection around the blocks": (
        ((LOOP, f"        first = x\n{LOOP}        x = x + first\n"),),
        "takes what is computed before the last block after its blocks",
    ),
    "hidden states as an argument": (
        ((LOOP, "        first = x\n" + LOOP.replace("block(x)", "block(x, first)")),),
        "blocks.0 is called with argument 1, which comes from hidden states",
    ),
    "hidden states in a dict": (
        ((LOOP, "        more = {'first': x}\n" + LOOP.replace("block(x)", "block(x, more=more)")),),
        "blocks.0 is called with argument more, which comes from hidden states",
    ),
    "an embedding in each block": (
        ((LOOP, LOOP.replace("block(x)", "block(x + self.tokens(tokens))")),),
        "GPT computes between blocks",
    ),
    "tokens after the blocks": (
        ((END, f"{END} * (tokens > 3)[..., None]"),),
        "GPT takes tokens or positions after its blocks",
    ),
    "blocks in another order": (
        ((LOOP, LOOP.replace("self.blocks", "reversed(self.blocks)")),),
        "GPT calls blocks 1, 0",
    ),
    "blocks run twice": (
        ((LOOP, LOOP.replace("self.blocks", "[*self.blocks, *self.blocks]")),),
        "GPT calls blocks 0, 1, 0, 1",
    ),
    "a bare parameter": (
        ((TIED, f"{TIED}        self.scale = nn.Parameter(torch.ones(1))\n"),),
        "scale is a parameter",
    ),
    "max_norm": (
        (
            (
                "self.places = nn.Embedding(vocabulary, width)",
                "self.places = nn.Embedding(vocabulary, width, max_norm=1.0)",
            ),
        ),
        "tokens has max_norm",
    ),
    "a head of its own class": (
        (
            ("class GPT(", "class Head(nn.Linear):\n    pass\n\n\nclass GPT("),
            ("nn.Linear(width, vocabulary, bias=False)", "Head(width, vocabulary, bias=False)"),
        ),
        "head is a Head, and a head is a torch.nn.Linear itself",
    ),
    "a parametrized row": (
        ((OUTPUT, "self.output = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))"),),
        "blocks.0.attention.output is a ParametrizedLinear",
    ),
    "a row with hooks": (
        ((OUTPUT, f"{OUTPUT}\n        self.output.register_forward_hook(lambda module, x, y: 2 * y)"),),
        "blocks.0.attention.output has hooks",
    ),
    "logits and a loss": (((END, f"{END}, None"),), "GPT returns a tuple; it should return the logits"),
    "logits of the last token": (((END, END.replace("(x)", "(x[:, -1:])")),), r"GPT returns \[1, 1, 32\]"),
    "a mask that it must be given": (
        (("positions: Tensor | None = None", "mask: Tensor"),),
        "GPT fails: .* 'mask'",
    ),
    "a buffer that checkpoints would hold": (
        ((NORMS, f'self.register_buffer("seen", torch.zeros(()))\n        {NORMS}'),),
        "blocks.0 has the torch buffer blocks.0.seen",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_layouts_cannot_compute_is_rejected_when_layers_are_built(
    name: str, tmp_path: Path
) -> None:
    """Otherwise it would train in silence as another model, or fail within PyTorch in the first step."""
    edits, words = MODULES[name]
    with pytest.raises(ConfigError, match=words):
        model_of(config_of(tmp_path, edits), "meta")


def test_embedding_and_head_that_are_tied_against_the_config(tmp_path: Path) -> None:
    """Other ranks would hold a second head."""
    with pytest.raises(ConfigError, match=r"head.weight and tokens.weight are one, and .* is false"):
        model_of(config_of(tmp_path, (), "model.tie_embeddings=false"), "meta")


PASSES: dict[str, tuple[tuple[Edit, ...], str]] = {
    "dropout in a block's code": (
        ((MLP, MLP.replace("self.mlp(self.norm2(x))", "F.dropout(self.mlp(self.norm2(x)), 0.1)")),),
        "blocks.0: ValueError: it draws random numbers",
    ),
    "dropout of attention": (
        ((SDPA, SDPA.replace("is_causal", "dropout_p=0.1, is_causal")),),
        "blocks.0: ValueError: it draws random numbers",
    ),
    "a buffer that forward changes": (
        (
            (NORMS, f'self.register_buffer("seen", torch.zeros(()), persistent=False)\n        {NORMS}'),
            (f"        {BEFORE}", f"        self.seen += 1\n        {BEFORE}"),
        ),
        "its forward changes the buffer blocks.0.seen",
    ),
    "a list of keys and values": (
        (
            (OUTPUT, f"{OUTPUT}\n        self.cache = []"),
            ("        y = F.", "        self.cache.append((k, v))\n        y = F."),
        ),
        "blocks.0.attention.cache keeps tensors of a pass",
    ),
    "a dict of hidden states": (
        ((MLP, "self.last = {'x': x}\n        " + MLP),),
        "blocks.0.last keeps tensors of a pass",
    ),
    "a block's tuple where hidden states are taken": (
        ((MLP, f"{MLP}, None"),),
        "blocks.0 returns a tuple, and the code after it takes hidden states",
    ),
    "hidden states where a tuple is taken": (
        (
            (LOOP, LOOP.replace("block(x)", "block(x, second=True)[0]")),
            (BLOCK_ARGUMENTS, BLOCK_ARGUMENTS.replace(") ->", ", second: bool) ->")),
        ),
        "blocks.0 returns Tensor, and the code after it takes the first of a tuple",
    ),
    "a batch size of its own": (
        (("self.qkv(x).split", "self.qkv(x).view(3, 8, -1).split"),),
        "line 21, blocks.0.attention: ",
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_mistake_in_code_is_reported_in_the_first_pass(name: str, tmp_path: Path) -> None:
    """With the module that it is in, and not as a traceback of PyTorch."""
    edits, words = PASSES[name]
    with pytest.raises(ConfigError, match=words):
        first_pass(config_of(tmp_path, edits))


RIGHT: dict[str, tuple[Edit, ...]] = {
    "as it is": (),
    "a block that returns a tuple": ((MLP, f"{MLP}, None"), (LOOP, LOOP.replace("block(x)", "block(x)[0]"))),
    "an object with logits": (
        (END, f"import types\n        return types.SimpleNamespace(logits={END[7:]}, loss=None)"),
    ),
    "logits that are scaled and biased": ((END, f"{END} * 2 + torch.zeros(32)"),),
    "a cache of constants": (
        (
            (OUTPUT, f"{OUTPUT}\n        self.cache = {{}}"),
            ("        y = F.", "        self.cache[x.shape[1]] = torch.ones(2)\n        y = F."),
        )
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_layouts_can_compute_is_not_rejected(name: str, tmp_path: Path) -> None:
    """A check that rejects a right module would keep its user from training it."""
    first_pass(config_of(tmp_path, RIGHT[name]))


def test_frozen_parameters_stay_frozen(tmp_path: Path) -> None:
    """They would otherwise be trained, which nothing would report."""
    frozen = f"{TIED}        self.places.weight.requires_grad_(False)\n"
    model = first_pass(config_of(tmp_path, ((TIED, frozen),)))
    trained = {name: parameter.grad is not None for name, parameter in model.named_parameters()}
    assert [name for name, has_gradient in trained.items() if not has_gradient] == ["places.weight"]


def test_the_table_is_read_as_written() -> None:
    """A column of three that is read as one would mix queries and keys."""
    parts = Parts({"a.b": "column/3", "a": "region", "c.*": "split 1/2", "d": "blocks", "*": "whole"})
    assert parts.role("a.b") == Role("column", 3) and parts.role("a") == Role("region")
    assert parts.role("c.x") == Role("split", 2, 1) and parts.end("blocks") == "d"
    assert parts.role("d") == Role("whole") and parts.enclosing("a.b.weight") == "region"


def test_a_plan_s_unknown_style_is_rejected() -> None:
    """It would otherwise be left whole, or divided in another way than the class means."""
    plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.experts.up": "packed_colwise"}
    assert parts_of_plan(plan, "X") == {
        "mlp.up_proj": "column",
        "mlp": "region",
        "mlp.experts.up": "split 1/2",
    }
    with pytest.raises(ValueError, match="X divides layers.*.o as 'colwise_gather_output'"):
        parts_of_plan({"layers.*.o": "colwise_gather_output"}, "X")


def test_parts_run_in_the_order_of_the_module_s_code(tmp_path: Path) -> None:
    """Stages of a pipeline would otherwise hold a norm that another stage calls."""
    order = order_of(plain_model(config_of(tmp_path, ())))
    assert (order.before, order.after, order.returns_tuple) == (("places",), ("norm",), False)


INITIAL = """
        nn.init.zeros_(self.blocks[0].mlp[2].weight)
        nn.init.constant_(self.norm.weight, 0.25)
        nn.init.normal_(self.blocks[1].attention.qkv.weight, std=0.3)
"""


def test_first_weights_are_the_module_s_own(tmp_path: Path) -> None:
    """No proof sees it if they are not, since it starts both sides from the same weights."""
    config = config_of(tmp_path, ((TIED, TIED + INITIAL),))
    with seeded(config.train.seed):
        expected = dict(module_of(config, "").named_parameters(remove_duplicate=False))
    model = model_of(config)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.view(expected[name].shape), expected[name]), name
    weights = dict(model.named_parameters())
    assert not weights["blocks.0.mlp.2.weight"].any()
    assert set(weights["norm.weight"].tolist()) == {0.25}


@pytest.mark.parametrize(("kind", "norm"), [("llama", 1.0), ("gemma2", 0.0)])
def test_first_weights_of_a_class_are_those_of_its_own_initialisation(
    kind: str, norm: float, tmp_path: Path
) -> None:
    """Gemma's norms multiply by 1 + w: drawn as others are, they would start at twice what they should."""
    hf = write_folder(tmp_path, kind, num_hidden_layers=2)
    (tmp_path / "run.json").write_text("{}")
    overrides = [f"model.hf={hf}", "train.device=cpu", "train.seq_len=8", "train.precision=fp32"]
    config = run_of(tmp_path / "run.json", *overrides)
    model, plain = model_of(config), plain_model(config)

    layers = [*plain.blocks, plain.embedding, plain.head, *plain.outer]
    for name, parameter in model.named_parameters():
        place = next(place for place in layers if name.startswith(f"{place}."))
        part = plain.part(place).to_empty(device="cpu")
        with seeded(config.train.seed, place):
            part.apply(plain.module._init_weights)  # type: ignore[arg-type]
        expected = part.get_parameter(name.removeprefix(f"{place}."))
        assert torch.equal(parameter.view(expected.shape), expected), name
    first = dict(model.named_parameters())[f"{plain.blocks[0]}.input_layernorm.weight"]
    assert set(first.tolist()) == {norm}
    assert isinstance(plain.module, nn.Module)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("bloom", "attention of BloomForCausalLM is its own code"),
        ("falcon", "attention of FalconForCausalLM is its own code"),
        ("phimoe", "window or chunk that only its mask knows"),
    ],
)
def test_a_class_that_needs_its_own_mask_is_rejected(kind: str, wrong: str, tmp_path: Path) -> None:
    """No mask is made for megacore's attention, so its tokens would see later ones, or beyond a window."""
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, float] = {"hidden_size": 16, "vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "bloom":
        sizes |= {"n_layer": 2, "n_head": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    elif kind == "falcon":
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    else:
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        sizes |= {"intermediate_size": 32, "num_local_experts": 2, "sliding_window": 3}
    transformers.AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    table = tmp_path / "table.py"
    table.write_text("PARTS = {}\n")
    config = tmp_path / "run.json"
    config.write_text('{"train": {"seq_len": 8, "micro_batch_size": 2, "global_batch_size": 2}}')
    overrides = [f"model.hf={tmp_path}", f"model.source={table}", *SMALL[4:]]
    with pytest.raises(ConfigError, match=wrong):
        first_pass(run_of(config, *overrides))


def test_a_layer_of_a_block_with_a_row_for_each_token_is_not_the_head(tmp_path: Path) -> None:
    """A small model's feed-forward layers may have as many features as there are tokens."""
    config = config_of(tmp_path, (), "model.hidden_size=8", "model.num_heads=2")
    assert config.model.vocab_size == 4 * config.model.hidden_size
    assert plain_model(config).head == "head"


@pytest.mark.parametrize(("kind", "wrong"), [("qwen3_moe", ""), ("qwen2_moe", "mlp has .*shared_expert")])
def test_a_plan_with_a_shared_expert_is_rejected(kind: str, wrong: str, tmp_path: Path) -> None:
    """Its plan leaves it whole, so that the sum over tensor ranks would add it once for each; the plan of
    Qwen3-MoE, which has a router alone, also names dense layers that no block has.
    """
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 32, "moe_intermediate_size": 16, "vocab_size": 32, "num_experts": 2}
    sizes |= {"num_experts_per_tok": 1, "shared_expert_intermediate_size": 16, "head_dim": 8}
    transformers.AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    config = tmp_path / "run.json"
    config.write_text('{"train": {"seq_len": 8, "micro_batch_size": 2, "global_batch_size": 2}}')
    loaded = run_of(config, f"model.hf={tmp_path}", *SMALL[4:])
    if not wrong:
        assert plain_model(loaded).parts.role("mlp").kind == "sum"
        return
    with pytest.raises(ConfigError, match=wrong):
        first_pass(loaded)


def test_logits_that_are_computed_from_each_other_are_rejected(tmp_path: Path) -> None:
    """Each tensor rank would normalise the logits that it has, and train another loss."""
    edits = ((END, "return F.log_softmax(self.head(self.norm(x)), -1)"),)
    with pytest.raises(ConfigError, match="computes logits from each other"):
        model_of(config_of(tmp_path, edits))


def test_logits_that_backward_needs_are_not_written_over(tmp_path: Path) -> None:
    """The loss writes its gradient over logits; those of a tanh are kept for the tanh's own gradient."""
    first_pass(config_of(tmp_path, ((END, "return torch.tanh(self.head(self.norm(x)))"),)))
