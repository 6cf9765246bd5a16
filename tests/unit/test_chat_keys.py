"""Keys of chat data that say what is learned are followed; unknown ones are errors.

Other trainers' data sets mark what must not be learned in many ways. A mark that is passed over teaches the
model what its authors wanted left out, and no loss shows it.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import prepare as script
from megacore.data.indexed import IndexedTokens
from megacore.errors import UserError
from megacore.tools.prepare import conversations
from megacore.tools.prepare.chat import Chat, chat_of, rendered_chat
from megacore.tools.prepare.conversations import LINE_KEYS, MESSAGE_KEYS, Use, WrongConversation
from megacore.tools.text.tokenizer import BytesTokenizer

ROOT = Path(__file__).resolve().parents[2]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def talk(**marks: Any) -> list[dict[str, Any]]:
    """Two questions and answers, the first answer with `marks`."""
    return [
        {"role": "user", "content": "two and two?"},
        {"role": "assistant", "content": "five"} | marks,
        {"role": "user", "content": "again?"},
        {"role": "assistant", "content": "four"},
    ]


@pytest.fixture(params=[CHATML, MARKED], ids=["chatml", "marked"])
def chat(request: pytest.FixtureRequest, tmp_path: Path) -> Chat:
    (tmp_path / "t.jinja").write_text(request.param)
    return chat_of("bytes", str(tmp_path / "t.jinja"))


@pytest.fixture
def chatml(tmp_path: Path) -> Chat:
    (tmp_path / "t.jinja").write_text(CHATML)
    return chat_of("bytes", str(tmp_path / "t.jinja"))


def learned(chat: Chat, record: Any) -> list[str]:
    """The texts that are learned of a line, without the ends of turns."""
    parts = rendered_chat(chat, BytesTokenizer(), json.dumps(record)).parts
    return [text.strip().removesuffix("<|im_end|>") for text, is_learned in parts if is_learned]


LEFT_OUT: list[dict[str, Any]] = [
    {"weight": 0},
    {"weight": 0.0},
    {"weight": False},
    {"train": False},
    {"training": False},
    {"loss": False},
    {"loss": 0},
    {"loss_weight": 0.0},
    {"loss_scale": 0},
    {"trainable": False},
    {"masked": True},
]


@pytest.mark.parametrize("mark", LEFT_OUT, ids=str)
def test_a_marked_answer_is_not_learned(mark: dict[str, Any], chat: Chat) -> None:
    """A wrong answer that is in the data as context would be taught."""
    assert learned(chat, {"messages": talk(**mark)}) == ["four"]


def test_every_mark_is_tried() -> None:
    marks = {key for key, (use, _) in MESSAGE_KEYS.items() if use in (Use.LEARN, Use.WEIGHT, Use.MASK)}
    assert marks == {key for mark in LEFT_OUT for key in mark}


@pytest.mark.parametrize(
    "mark", [{"weight": 1}, {"train": True}, {"masked": False}, {"weight": None}], ids=str
)
def test_an_answer_marked_as_learned_is(mark: dict[str, Any], chat: Chat) -> None:
    assert learned(chat, {"messages": talk(**mark)}) == ["five", "four"]


def test_a_marked_question_is_learned(chat: Chat) -> None:
    messages = talk()
    messages[2]["train"] = True
    assert learned(chat, {"messages": messages}) == ["five", "again?", "four"]


def test_unmask_learns_all_but_the_system_message(chat: Chat) -> None:
    """InstructLab's knowledge phase: the document is in the user's message, and is what shall be learned."""
    messages = [{"role": "system", "content": "You add."}, *talk()]
    assert learned(chat, {"messages": messages, "unmask": True}) == ["two and two?", "five", "again?", "four"]
    assert learned(chat, {"messages": messages, "unmask": False}) == ["five", "four"]
    messages[2]["weight"] = 0  # what a message says counts more than its line
    assert learned(chat, {"messages": messages, "unmask": 1}) == ["two and two?", "again?", "four"]


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        ({"messages": talk(weight=0.5)}, "has weight 0.5 in message 2"),
        ({"messages": talk(train="no")}, "has train 'no' in message 2"),
        ({"messages": talk(weight=0, train=True)}, "of which train contradicts another"),
        ({"messages": talk(train_detail=[{"begin_offset": 0}])}, "which characters are learned"),
        ({"messages": talk(function_call={"name": "f"})}, "tool_calls is the newer one"),
        ({"messages": talk(mood="sad")}, "has the key mood in message 2, which may change what is learned"),
        ({"messages": talk(), "toxicity": 0.1}, "has the key toxicity, which may change what is learned"),
        ({"messages": talk(a=1), "b": 2}, "has the keys b, a in message 2, which may change what is learned"),
        ({"messages": talk(), "weight": 2.0}, "has weight 2.0"),
        ({"messages": talk(), "weight": 0}, "has weight 0, so nothing of it is learned"),
        ({"messages": talk(), "mask": "Assistant"}, "has mask 'Assistant'"),
        ({"messages": talk(), "chosen": talk()}, "for preference training"),
        ({"messages": talk(), "conversations": talk()}, "has conversations under messages and conversations"),
        ({"messages": talk(), "chat_template_kwargs": {"messages": []}}, "has a wrong chat_template_kwargs"),
        ({"messages": talk(), "tools": "one"}, "has tools that are not a list"),
        ({"messages": [talk()[0], talk(weight=0)[1]]}, "marks every answer as not learned"),
        ({"messages": [talk(weight=1)[1] | {"role": "user"}, talk()[1]]}, "which is not an answer"),
        ({"messages": talk(content=[{"type": "text", "text": "a", "weight": 0}])}, "has weight in a part"),
        (
            {"messages": talk(content=[{"type": "image_url"}])},
            "has a part of the type 'image_url' in message 2",
        ),
        ({"messages": talk(**{"from": "human"})}, "has role and from in message 2, which differ"),
        ({"messages": talk(value="six")}, "has content and value in message 2, which differ"),
        ({"messages": talk(tool_calls="foo")}, "has tool_calls in message 2 without the name"),
        ({"messages": talk(tool_calls=[{"name": "f", "parameters": {}}])}, "has parameters in tool_calls"),
        (
            {"messages": [{"role": "system", "content": "a"}, *talk()], "system": "b"},
            "another in its messages",
        ),
        ({"prompt": talk()[:2], "completion": "b"}, "has a prompt that ends with an answer"),
        ({"instruction": "a", "output": ""}, "has an empty answer, message 2"),
        (
            {"messages": talk(), "chat_template_kwargs": {"bos_token": "x"}},
            "has a wrong chat_template_kwargs",
        ),
        ({"messages": talk(), "system": "s", "prompt": "x"}, "has the key prompt, which may change"),
        ({"prompt": "a", "answer": "b"}, "has no list of messages; its keys are prompt, answer"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "has a history that is not a list of pairs"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "has the unknown role 'narrator'"),
    ],
)
def test_what_cannot_be_followed_is_an_error(record: Any, wrong: str, chatml: Chat) -> None:
    with pytest.raises(WrongConversation) as caught:
        learned(chatml, record)
    assert wrong in caught.value.args[0] and "\n" not in "".join(caught.value.args)


SHAREGPT = [
    {"from": "human", "value": "two and two?"},
    {"from": "gpt", "value": "five"},
    {"from": "human", "value": "again?"},
    {"from": "gpt", "value": "four"},
]
FORMS: dict[str, Any] = {
    "messages": {"messages": talk()},
    "parts": {"messages": [m | {"content": [{"type": "text", "text": m["content"]}]} for m in talk()]},
    "sharegpt": {"conversations": SHAREGPT, "id": "x1"},
    "sharegpt_json": {"conversations": json.dumps(SHAREGPT)},
    "alpaca": {
        "instruction": "again?",
        "input": "",
        "output": "four",
        "history": [["two and two?", "five"]],
        "text": "Below is an instruction …",
    },
    "pair": {"prompt": talk()[:3], "completion": talk()[3:], "source": "x"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_conversation(form: str, chatml: Chat) -> None:
    expected = rendered_chat(chatml, BytesTokenizer(), json.dumps({"messages": talk()})).parts
    expected_learned = [text for text, is_learned in expected if is_learned]
    parts = rendered_chat(chatml, BytesTokenizer(), json.dumps(FORMS[form])).parts
    assert "".join(text for text, _ in parts) == "".join(text for text, _ in expected)
    # the prompt of a pair is not learned, even where it has an answer
    expected_learned = expected_learned[1:] if form == "pair" else expected_learned
    assert [text for text, is_learned in parts if is_learned] == expected_learned


def test_alpaca_and_a_plain_pair(chatml: Chat) -> None:
    parts = rendered_chat(
        chatml,
        BytesTokenizer(),
        json.dumps({"instruction": "Add.", "input": "2 2", "output": "4", "system": "S"}),
    ).parts
    text = "".join(text for text, _ in parts)
    assert text.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nAdd.\n2 2<|im_end|>")
    assert learned(chatml, {"prompt": "2 2", "completion": "4"}) == ["4"]


CALL = {"name": "add", "arguments": {"a": 2}}


@pytest.mark.parametrize(
    "record",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "function": CALL | {"arguments": '{"a": 2}'}}],
        },
        {"from": "function_call", "value": json.dumps(CALL)},
    ],
    ids=["object", "text", "sharegpt"],
)
def test_tool_calls_are_learned_in_whatever_form(record: Any, chatml: Chat) -> None:
    """Arguments that are stored as text would be learned with their quotes escaped."""
    messages = [{"role": "user", "content": "2?"}, record, {"role": "tool", "content": "4"}, talk()[3]]
    assert learned(chatml, {"messages": messages, "tools": [{"function": CALL}]}) == ['add({"a": 2})', "four"]


def run(folder: Path, lines: list[Any], *more: str, template: str = CHATML) -> IndexedTokens:
    content = "".join(json.dumps(line) + "\n" for line in lines)
    if not (folder / "talk.jsonl").exists() or (folder / "talk.jsonl").read_text() != content:
        (folder / "talk.jsonl").write_text(content)
    (folder / "t.jinja").write_text(template)
    words = ["--chat", "--input", str(folder / "talk.jsonl"), "--output", str(folder / "out/x")]
    script.run(
        [*words, "--tokenizer", "bytes", "--template", str(folder / "t.jinja"), "--workers", "1", *more]
    )
    return IndexedTokens(str(folder / "out/x"))


def learned_bytes(corpus: IndexedTokens) -> bytes:
    tokens, mask = corpus.read(0, corpus.num_tokens), corpus.learned(0, corpus.num_tokens)
    return bytes(np.asarray(tokens, np.uint8)[mask])


def test_the_mask_of_the_corpus_follows_the_keys(tmp_path: Path, capsys: Any) -> None:
    lines = [{"messages": talk(weight=0), "id": "a", "source": "web"}, {"messages": talk(), "id": "b"}]
    assert learned_bytes(run(tmp_path, lines)) == b"four<|im_end|>\nfive<|im_end|>\nfour<|im_end|>\n"
    output = capsys.readouterr().out
    assert "not used, because they do not change what is learned: id (2), source (1)" in output


def test_an_unknown_key_names_its_line_and_the_way_out(tmp_path: Path, capsys: Any) -> None:
    lines = [{"messages": talk()}, {"messages": talk(), "language": "en", "model": "m"}]
    with pytest.raises(
        UserError, match=r"line 2 has the keys language, model, .*\(--ignore-keys language,model,"
    ):
        run(tmp_path, lines)
    assert not (tmp_path / "out").exists()
    run(tmp_path, lines, "--ignore-keys", "language, model,mood")
    output = capsys.readouterr()
    assert (
        "ignored, as --ignore-keys says: language (1), model (1)" in output.out
        and "--ignore-keys: no line has mood" in output.err
    )
    with pytest.raises(UserError, match="has no role in message 1"):
        run(tmp_path, lines, "--ignore-keys", "language,model,role")


def test_reasoning_that_the_template_leaves_out_is_reported(tmp_path: Path, capsys: Any) -> None:
    lines = [{"messages": talk(reasoning_content="2 + 2")}] * 3
    assert b"<think>2 + 2</think>five" in learned_bytes(run(tmp_path, lines))
    assert "does not write" not in capsys.readouterr().err
    run(tmp_path, lines, template=MARKED)
    output = capsys.readouterr().err
    assert "the template does not write reasoning_content of the role assistant as it is, 3 times" in output


def test_notes_survive_a_kill(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started again, a preparation would otherwise report the keys of the rest only."""
    from megacore.tools.prepare import prepare, sources

    monkeypatch.setattr(prepare, "TASK_BYTES", 1000)
    monkeypatch.setattr(prepare, "COMMIT_BYTES", 1000)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1000)
    lines = [{"messages": talk(), "id": str(number)} for number in range(40)]
    encode_task, done = prepare.encode_task, []

    def killed(*args: Any) -> Any:
        done.append(1)
        if len(done) == 5:
            raise KeyboardInterrupt
        return encode_task(*args)

    monkeypatch.setattr(prepare, "encode_task", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, lines)
    run(tmp_path, lines)
    output = capsys.readouterr().out
    assert "resumed an earlier start" in output and "id (40)" in output


def test_show_prints_what_is_learned_and_writes_nothing(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk(weight=0)}) + "\n")
    (tmp_path / "t.jinja").write_text(CHATML)
    words = ["--chat", "--input", str(tmp_path / "talk.jsonl"), "--tokenizer", "bytes"]
    script.run([*words, "--template", str(tmp_path / "t.jinja"), "--show", "3"])
    output = capsys.readouterr().out
    assert "talk.jsonl, line 1" in output and "<|im_start|>assistant\nfive<|im_end|>" in output
    assert "⟦four<|im_end|>\n⟧" in output and len(list(tmp_path.iterdir())) == 2


def test_columns_of_tables_are_keys_too(tmp_path: Path) -> None:
    """Columns besides the messages were not even read."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[datasets]'")
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "t.jinja").write_text(CHATML)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    table = pyarrow.table({"messages": [messages, messages], "unmask": [True, None]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    words = ["--chat", "--input", str(tmp_path / "t.parquet"), "--output", str(tmp_path / "x")]
    script.run([*words, "--tokenizer", "bytes", "--template", str(tmp_path / "t.jinja"), "--workers", "1"])
    assert learned_bytes(IndexedTokens(str(tmp_path / "x"))) == b"a<|im_end|>\nb<|im_end|>\nb<|im_end|>\n"


NOW: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "now", "arguments": "{}"}}],
}
TIME = {"role": "assistant", "tool_calls": '[{"name": "now", "arguments": {"tz": "CET"}}]'}


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (NOW, "now({})"),  # arguments that are empty, as text
        (TIME, 'now({"tz": "CET"})'),  # calls that a table stores as JSON
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": '{"tz": "é"}'}}]},
            'now({"tz": "é"})',
        ),
    ],
)
def test_arguments_are_never_escaped(call: Any, written: str, chatml: Chat) -> None:
    """Even where the same text is in the question, or is a part of any text."""
    question = {"role": "user", "content": 'call it with {"tz": "é"} or {}'}
    assert learned(chatml, {"messages": [question, call]}) == [written]


WITHOUT_CALLS = CHATML.replace("{% for c in m.tool_calls or [] %}", "{% for c in [] %}")
ONE_CALL = CHATML.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
WRONG_KEY = CHATML.replace("c.function.arguments | tojson", "c.function.args")
WITHOUT_TOOLS = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "now?"},
    NOW | {"tool_calls": [*NOW["tool_calls"], *NOW["tool_calls"]]},
]
CALLS[1]["tool_calls"][1] = {"function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize("template", [WITHOUT_CALLS, ONE_CALL, WRONG_KEY])
def test_calls_that_the_template_drops_are_an_error(template: str, tmp_path: Path) -> None:
    """The model would learn to say nothing where it should call; the name is elsewhere in the text too."""
    (tmp_path / "t.jinja").write_text(template)
    with pytest.raises(
        WrongConversation, match="has tool calls in message 2 that the template does not write"
    ):
        learned(chat_of("bytes", str(tmp_path / "t.jinja")), {"messages": CALLS})


def test_a_short_text_that_the_template_drops_is_reported(tmp_path: Path, capsys: Any) -> None:
    """The digit is in the answer as well, so looking it up in the text finds it."""
    messages = [*talk()[:2], {"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4"}]
    run(tmp_path, [{"messages": messages}], template=WITHOUT_TOOLS)
    assert "does not write content of the role tool as it is, 1 time" in capsys.readouterr().err


def test_an_answer_that_the_template_drops_is_an_error(tmp_path: Path) -> None:
    last_only = MARKED.replace(
        "{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' and loop.last %}"
    )
    (tmp_path / "t.jinja").write_text(
        last_only.replace("{{ m.content }}<|im_end|>\n{% endif %}", "{% endif %}")
    )
    with pytest.raises(
        WrongConversation, match="has message 2, which is to be learned and which the template"
    ):
        learned(chat_of("bytes", str(tmp_path / "t.jinja")), {"messages": talk()})


def test_marked_spans_belong_to_their_messages(tmp_path: Path) -> None:
    """As many spans as answers, and yet not one for each: the masked call has none, the answer two."""
    template = (
        "{% for m in messages %}{{ m.role }}: "
        "{% if m.reasoning_content %}"
        "{% generation %}({{ m.reasoning_content }}){% endgeneration %}{% endif %}"
        "{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.role == 'assistant' and m.content %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content or '' }}{% endif %}\n{% endfor %}"
    )
    (tmp_path / "t.jinja").write_text(template)
    answer = {"role": "assistant", "content": "noon", "reasoning_content": "hm"}
    messages = [talk()[0], NOW | {"weight": 0}, {"role": "tool", "content": "12:00"}, answer]
    assert learned(chat_of("bytes", str(tmp_path / "t.jinja")), {"messages": messages}) == ["(hm)", "noon"]


def test_a_null_is_not_written_as_a_word(tmp_path: Path) -> None:
    """A call without a content would teach the model to say None before it."""
    (tmp_path / "t.jinja").write_text(CHATML.replace("m.content or ''", "m.content"))
    with pytest.raises(WrongConversation, match="writes a value that is null as the word None"):
        learned(chat_of("bytes", str(tmp_path / "t.jinja")), {"messages": [talk()[0], NOW]})


def test_data_cannot_move_the_mask(chat: Chat) -> None:
    """The code points that mark answers, wherever they are and however they are spelled."""
    for name in ("\ufdd0x\ufdd1", "\ufdd2"):
        with pytest.raises(WrongConversation, match=r"holds U\+FDD0"):
            learned(chat, {"messages": talk(), "tools": [{"name": name}]})
    line = json.dumps({"messages": talk(name="\ufdd1")}, ensure_ascii=False)
    with pytest.raises(WrongConversation, match=r"holds U\+FDD0"):
        rendered_chat(chat, BytesTokenizer(), line)


def test_unknown_keys_of_a_block_are_listed_at_once(tmp_path: Path) -> None:
    """A start for each key of a large set would take a day."""
    lines = [{"messages": talk(), "a": 1}, {"messages": talk(b=1)}, {"messages": talk(), "chosen": "x"}]
    with pytest.raises(UserError, match=r"line 1 has the key a, .*\(--ignore-keys a,b,chosen, if"):
        run(tmp_path, lines)
    run(tmp_path, lines, "--ignore-keys", "a,b,chosen")


def test_system_and_nemo_and_pairs(chatml: Chat) -> None:
    nemo: dict[str, Any] = {"mask": "User", "system": "S", "conversations": [{"from": "User", "value": "a"}]}
    nemo["conversations"].append({"from": "Assistant", "value": "b"})
    assert learned(chatml, nemo) == ["b"]
    assert learned(chatml, {"query": "a", "response": "b", "history": []}) == ["b"]
    merged = {"role": None, "content": None, "from": "gpt", "value": "b"}
    assert learned(chatml, {"messages": [talk()[0], merged]}) == ["b"]


@pytest.mark.parametrize("fault", ["weight", "unmask"])
def test_a_key_that_is_passed_over_is_noticed(
    fault: str, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: a table that takes a mark for bookkeeping changes what is learned."""
    table = MESSAGE_KEYS if fault == "weight" else LINE_KEYS
    record = {"messages": talk(weight=0)} if fault == "weight" else {"messages": talk(), "unmask": True}
    right = conversations.read_conversation(record).learned
    monkeypatch.setitem(table, fault, (Use.UNUSED, "bookkeeping"))
    assert conversations.read_conversation(record).learned != right


def test_the_guide_has_every_key() -> None:
    """A reader of the guide can tell what will happen to a data set before preparing it."""
    page = (ROOT / "docs/recipes.md").read_text()
    keys = {*MESSAGE_KEYS, *LINE_KEYS}
    assert [key for key in sorted(keys) if f"`{key}`" not in page and f'"{key}"' not in page] == []
