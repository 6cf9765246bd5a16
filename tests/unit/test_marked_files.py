"""Text files of the user: a byte order mark before the text does not count, and a key twice is an error."""

import codecs
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megacore.config.source import execute
from megacore.errors import UserError
from megacore.model.plain.folder import read_content
from megacore.pipeline.generators import build
from megacore.tools.interchange.folder import read_json as read_model_json
from megacore.tools.interchange.instructlab import read_recipe
from megacore.tools.planner.devices import read_cluster, read_device
from megacore.tools.preflight.reach import SETTINGS_FILE, forwarded
from megacore.tools.relaunch.hosts import read_hostfile
from megacore.tools.schedules.plan_file import read_plan, write_plan
from megacore.tools.settings.ds_settings import read as read_ds_config
from megacore.tools.settings.load import load
from megacore.tools.sweep.spec import read_spec
from megacore.tools.text.tokenizer import load_tokenizer
from tests.conversion import export, random_run, take_in

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Kind:
    """A kind of file: its name, its text, and what a path of it is read as."""

    name: str
    text: str
    read: Callable[[Path], Any]


def plan_text(folder: Path) -> str:
    """Return a schedule's plan for two ranks as a file has it."""
    write_plan("--output", str(folder / "written.json"), build("1f1b", 2, 4))
    return (folder / "written.json").read_text()


def with_settings_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return what the deepspeed launcher forwards if `path` is its file of variables."""
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(Path, "home", lambda: path.parent)
    return forwarded({})


def template_settings(path: Path) -> Any:
    """Return what a tokenizer says of its end token in its tokenizer_config.json at `path`."""
    vocab = {"a": 0, "b": 1, "</s>": 2}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    added = [{"id": 2, "content": "</s>", "special": True, "normalized": False}]
    added[0] |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    path.with_name("tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    return load_tokenizer(str(path.with_name("tokenizer.json"))).end_of_document


STAGES = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
TOKENIZER = {"version": "1.0", "added_tokens": [], "model": BPE} | dict.fromkeys(STAGES)
FORK = (ROOT / "configs/forks/hybrid.py").read_text()
KINDS: dict[str, Kind] = {
    "config": Kind("c.json", '{"train": {"steps": 7}}', lambda path: load(str(path), []).config.train.steps),
    "ds_config": Kind(
        "ds.json", '{"zero_optimization": {"stage": 1}}', lambda path: read_ds_config(str(path))
    ),
    "hostfile": Kind("hostfile", "node1 slots=2\nnode2 slots=2\n", read_hostfile),
    "sweep": Kind("s.json", '{"config": "c.json", "grid": {"optim.lr": [0.1]}}', lambda p: read_spec(str(p))),
    "device": Kind(
        "device.json",
        (ROOT / "megacore/tools/planner/devices/h100.json").read_text(),
        lambda path: read_device(str(path)),
    ),
    "cluster": Kind(
        "cluster.json",
        (ROOT / "megacore/tools/planner/clusters/dgx_h100.json").read_text(),
        lambda path: read_cluster(str(path)),
    ),
    "InstructLab's config": Kind(
        "config.yaml", "train:\n  num_epochs: 3\n", lambda path: read_recipe(str(path))
    ),
    "source of a model": Kind(
        "model.py",
        FORK,
        lambda path: execute(str(path), None).digest,
    ),
    "config of a module": Kind("config.json", '{"model_type": "gpt2"}', read_content),
    "config of an import": Kind("config.json", '{"model_type": "gpt2"}', read_model_json),
    "tokenizer.json": Kind(
        "tokenizer.json", json.dumps(TOKENIZER), lambda path: load_tokenizer(str(path)).vocab_size
    ),
    "tokenizer_config.json": Kind("tokenizer_config.json", '{"eos_token": "</s>"}', template_settings),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_byte_order_mark_does_not_count(name: str, tmp_path: Path) -> None:
    """Editors on Windows write one, and nobody sees it."""
    kind = KINDS[name]
    results = []
    for folder, mark in (("plain", b""), ("marked", codecs.BOM_UTF8)):
        path = tmp_path / folder / kind.name
        path.parent.mkdir()
        path.write_bytes(mark + kind.text.encode())
        results.append(kind.read(path))
    assert results[0] == results[1] and results[0] is not None


def test_a_marked_plan(tmp_path: Path) -> None:
    text = plan_text(tmp_path)
    (tmp_path / "marked.json").write_bytes(codecs.BOM_UTF8 + text.encode())
    plans = [read_plan(str(tmp_path / name), 2, 4) for name in ("written.json", "marked.json")]
    assert plans[0] == plans[1]


def test_marked_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / SETTINGS_FILE
    path.write_bytes(codecs.BOM_UTF8 + b"NCCL_DEBUG=INFO\n")
    assert with_settings_file(path, monkeypatch)["NCCL_DEBUG"] == "INFO"


def test_a_marked_model_comes_in_and_goes_out(tmp_path: Path) -> None:
    """transformers rejects such files, so they lose the mark on the way."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[test]'")
    random_run(tmp_path / "made", vocab_size=400)
    folder = export(tmp_path / "made", tmp_path / "theirs")
    texts = {
        "config.json": (folder / "config.json").read_text(),
        "generation_config.json": '{"eos_token_id": [2, 5]}',
        "tokenizer.json": json.dumps(TOKENIZER),
        "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}',
        "vocab.json": '{"a": 0, "b": 1}',
        "merges.txt": "#version: 0.2\na b\n",
        "chat_template.jinja": "{% for message in messages %}{% endfor %}",
    }
    for name, text in texts.items():
        (folder / name).write_bytes(codecs.BOM_UTF8 + text.encode())
    run = take_in(folder, tmp_path / "run")
    back = export(run, tmp_path / "back")
    for name, text in texts.items():
        assert not (back / name).read_bytes().startswith(codecs.BOM_UTF8), name
        if name not in ("config.json", "generation_config.json"):
            assert (run / "tokenizer" / name).read_text() == text == (back / name).read_text()
    assert json.loads((back / "generation_config.json").read_text()) == {"eos_token_id": [2, 5]}


@pytest.mark.parametrize("name", ["config", "ds_config", "sweep", "device", "cluster", "config of a module"])
def test_a_key_twice_in_json(name: str, tmp_path: Path) -> None:
    """Python's parser takes the last one, and what the first says would be ignored without a word."""
    kind = KINDS[name]
    key = next(iter(json.loads(kind.text)))
    path = tmp_path / kind.name
    path.write_text("{" + f'"{key}": {json.dumps(json.loads(kind.text)[key])}, ' + kind.text.strip()[1:])
    with pytest.raises(UserError, match=f"the key {key} twice in one object") as error:
        kind.read(path)
    assert "\n" not in str(error.value)


def test_a_key_twice_in_a_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"version": 1, ' + plan_text(tmp_path).strip()[1:])
    with pytest.raises(UserError, match=r"plan\.json is no plan: the key version twice in one object"):
        read_plan(str(tmp_path / "plan.json"), 2, 4)


@pytest.mark.parametrize(
    "text",
    [
        "train:\n  num_epochs: 3\n  max_seq_len: 9\n  num_epochs: 4\n",
        "train: {additional_args: {num_epochs: 1, num_epochs: 1}}\n",
        "train: {num_epochs: 1}\ngeneral: {}\ntrain: {num_epochs: 2}\n",
    ],
)
def test_a_key_twice_in_yaml(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml: is no YAML: the key \w+ twice in one object"):
        read_recipe(str(tmp_path / "config.yaml"))
