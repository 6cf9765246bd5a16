"""Every document holds what `tests.documents` checks: its commands parse, its links lead somewhere, and its
examples print what the page shows. Run `python -m tests.documents` to see all findings at once.
"""

from pathlib import Path

import pytest

from tests.documents.__main__ import findings_in
from tests.documents.examples import failed_examples, runnable
from tests.documents.idioms import KEPT, idioms
from tests.documents.links import FOLDERS, unlisted_pages, wrong_pages_in_code, wrong_pages_in_text
from tests.documents.pages import ROOT, Fence, Page, documents
from tests.documents.shell import commands

PAGES = list(documents())
# In two parts, because the check of the code would find them here.
NOWHERE = "docs/" + "nowhere.md"
ANCHOR = "#nowhere"
PLANTED = "docs/" + "planted.md"
RESULT = "benchmarks/results/" + "planted.md"


def found(text: str, name: str = PLANTED) -> list[str]:
    """The findings in a page with this text, without the page's name."""
    return [f"{finding.line}: {finding.what}" for finding in findings_in(Page(name, text))]


def in_fence(*lines: str, info: str = "bash") -> str:
    return "\n".join((f"```{info}", *lines, "```"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_mistakes(page: Page) -> None:
    assert [str(finding) for finding in findings_in(page)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.name)
def test_examples_print_what_the_page_shows(page: Page, tmp_path: Path) -> None:
    assert [str(finding) for finding in failed_examples(page, tmp_path)] == []


def test_the_code_refers_to_pages_that_exist() -> None:
    assert [str(finding) for finding in wrong_pages_in_code()] == []
    assert all((ROOT / folder).is_dir() for folder in FOLDERS if not folder.startswith("."))


def test_the_table_of_contents_is_complete() -> None:
    """A document that nothing leads to is not read."""
    assert [str(finding) for finding in unlisted_pages()] == []


def test_all_kinds_of_documents_are_read() -> None:
    names = {page.name for page in PAGES}
    assert {
        "README.md",
        "CONTRIBUTING.md",
        "docs/README.md",
        "kernels/README.md",
        "benchmarks/README.md",
    } <= names
    assert any(name.startswith("benchmarks/results/") for name in names)
    assert sum(len(page.fences) for page in PAGES) > 100


# --- planted mistakes: each is reported at its line ---------------------------------------------------------

PLAN = "python launch/plan.py --config configs/gpt_tiny.json"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (in_fence(f"{PLAN} --wrold 2"), "2: launch/plan.py: config error: arguments: unrecognized arguments"),
        (
            in_fence("echo", "torchrun --nproc-per-node 2 launch/plan.py --cnfig a"),
            "3: launch/plan.py: config error",
        ),
        (in_fence("python -m benchmarks.speed --qiuck"), "2: python -m benchmarks.speed: config error"),
        (
            in_fence("python launch/nothing.py"),
            "2: python launch/nothing.py: the checkout has no such script",
        ),
        (in_fence("python -m tests.nothing"), "2: python -m tests.nothing: the checkout has no such script"),
        (in_fence("megacore plam --world 2"), "2: megacore plam: the checkout has no such script"),
        (
            in_fence("megacore plan --config configs/gpt_tiny.json --wrold 2"),
            "2: launch/plan.py: config error",
        ),
        (in_fence("python ./launch/plan.py --wrold 2"), "2: launch/plan.py: config error"),
        (
            in_fence("python launch/checkpoint.py info runs/a --tensor", info="bash needs a run"),
            "2: launch/checkpoint.py: --tensor is not an option",
        ),
        (
            in_fence("python launch/plan.py --config configs/nothing.json", info="bash needs a cluster"),
            "2: configs/nothing.json is not in the checkout",
        ),
        (in_fence("source launch/nothing.sh"), "2: launch/nothing.sh is not in the checkout"),
        (
            in_fence(f"{PLAN} model.num_layer=2"),
            "2: launch/plan.py would reject this: config error: model.num_layer",
        ),
        (
            in_fence(f"{PLAN} train.seq_len=0"),
            "2: launch/plan.py would reject this: config error: train.seq_len",
        ),
        (
            in_fence(
                "torchrun --nproc-per-node 3 launch/pretrain.py --config configs/gpt_tiny.json "
                "data.train=my_corpus parallel.tensor=2"
            ),
            "2: launch/pretrain.py would reject this: config error",
        ),
        (
            in_fence(
                "python launch/evaluate.py --checkpoint my_run paralel.tensor=2", info="bash needs a run"
            ),
            "2: paralel.tensor is not a setting of the config",
        ),
        (in_fence("python launch/compare.py runs/a"), "2: runs/a: no earlier command on the page makes this"),
        (
            in_fence(f"{PLAN} parallel.schedule=file:plan.json parallel.pipeline=2"),
            "2: plan.json: no earlier command on the page makes this",
        ),
        (
            in_fence("python launch/pretrain.py --config configs/gpt_1b.json"),
            "2: data/train: no earlier command",
        ),
        (
            in_fence("python launch/pretrain.py --config configs/gpt_tiny.json"),
            "2: reads what launch/quickstart.sh makes",
        ),
        (
            in_fence("python launch/supervise.py torchrun launch/pretrain.py --confg a", info="bash needs a"),
            "2: launch/pretrain.py: config error",
        ),
        (in_fence("echo 'a"), "2: bash cannot read this line"),
        (
            f"a\n\n`{PLAN} --wrold 2` plans",
            "3: launch/plan.py: config error: arguments: unrecognized arguments",
        ),
        ("`launch/plan.py --serch`", "1: launch/plan.py: config error: arguments: unrecognized arguments"),
        ("`plan.py --serch`", "1: launch/plan.py: config error: arguments: unrecognized arguments"),
        ("a\n[a](nowhere.md)", "2: link to nowhere.md: no such file"),
        ("[a](README.md#nowhere)", "1: link to README.md#nowhere: no such heading"),
        ("# Here\n\n[a](#there)", "3: link to #there: no such heading"),
        ("| [a](nowhere.md) |", "1: link to nowhere.md: no such file"),
        ("`launch/nowhere.py`", "1: `launch/nowhere.py`: the checkout has no launch/nowhere.py"),
        ("`megacore/files.py:Nothing`", "1: `megacore/files.py:Nothing`: megacore/files.py has no Nothing"),
        (in_fence("a", info=""), "1: a fence without a language"),
        (in_fence("a", info="bahs"), "1: bahs is not a language of fences"),
        (in_fence("ls", info="bash runs"), "1: bash runs: after bash comes run, or needs WHAT"),
        (in_fence('{"a": 1,', info="json"), "invalid JSON"),
        (in_fence("a = (", info="python"), "Python that does not compile"),
        ("a\n\nOn a Xeon it is fast.", "3: Xeon: a guide has no processor's name"),
        ("On a Zen 5", "1: Zen 5: a guide has no processor's name"),
        ("Measured 2026-11-22", "1: 2026-11-22: a guide has no date"),
        ("until 08c71b9 or so", "1: 08c71b9: a guide has no commit hash"),
    ],
)
def test_a_planted_mistake_is_found(text: str, wanted: str) -> None:
    findings = found(text)
    assert len(findings) == 1 and wanted in findings[0], findings


@pytest.mark.parametrize(
    "text",
    [
        in_fence(f"{PLAN} --world 2 \\", "  train.steps=20  # it's enough", "", "# a comment"),
        in_fence('C="--config configs/gpt_tiny.json"', "python launch/plan.py $C | head -n 3 > plan.txt"),
        in_fence("python launch/plan.py --config configs/gpt_7b.json --world N"),
        in_fence("OMP_NUM_THREADS=1 timeout 9 python -m benchmarks.speed --quick && echo done"),
        in_fence(
            "deepspeed --hostfile hostfile launch/pretrain.py --config configs/gpt_7b.json",
            info="bash needs a",
        ),
        in_fence(
            "megacore -h",
            "python -m megacore plan --config configs/gpt_tiny.json",
            "torchrun -m megacore plan -h",
        ),
        in_fence("bash launch/quickstart.sh", "python launch/evaluate.py --checkpoint runs/quickstart"),
        in_fence(
            "python launch/prepare.py --input my.txt --output data/mine --tokenizer bytes",
            "python launch/pretrain.py --config configs/gpt_tiny.json data.train=data/mine log.dir=runs/mine",
            "python launch/compare.py runs/mine runs/mine",
        ),
        in_fence(
            "python launch/checkpoint.py import my_model --format hf --output runs/gpt2",
            "python launch/pretrain.py --config runs/gpt2/config.json data.train=data/stdlib",
            "python launch/generate.py --checkpoint runs/gpt2_finetuned --prompt a/b",
        )
        + "\nafter `launch/quickstart.sh`",
        "`launch/samples.py --prove`, `plan.py --search` and `python -m benchmarks.speed` are parts",
        "`python -m benchmarks.gpu SLICE` and `launch/FILE.py`",
        "[a](../benchmarks/results/) ran in 2026, as `benchmarks/results/peers_2026-11-22.md` says",
        "# A `b` (c)\n\n[a](#a-b-c) and `[x](nowhere.md)`\n\n" + in_fence("[x](nowhere.md)", info="text"),
        in_fence('{"a": 1}', info="json") + "\n" + in_fence("a: int = ...", info="python"),
        in_fence("a\\", "b", info="sh"),
    ],
)
def test_what_is_right_is_not_reported(text: str) -> None:
    assert found(text) == []


def test_an_old_name_of_an_option_is_reported() -> None:
    [finding] = found(in_fence(f"{PLAN} --local_rank 1"))
    assert "unrecognized" in finding
    assert (
        found(
            in_fence(
                "python launch/pretrain.py --config configs/gpt_1b.json --local_rank 1", info="bash needs a"
            )
        )
        == []
    )


def test_a_page_in_a_string_must_exist() -> None:
    text = (
        f'"""See README.md."""\nMORE = "see {NOWHERE}"\nRIGHT = "docs/README.md"  # docs/README.md{ANCHOR}\n'
    )
    findings = [(finding.line, finding.what) for finding in wrong_pages_in_text("a.py", text)]
    assert findings == [
        (2, f"refers to {NOWHERE}, which does not exist"),
        (3, f"refers to docs/README.md{ANCHOR}, which is not a heading there"),
    ]


@pytest.mark.parametrize(
    "sentence",
    [
        "The run goes on from the last checkpoint.",
        "A checkpoint stands in the run's folder.",
        "Write an optimizer of your own.",
        "A wrong key is refused.",
        "It takes a part of the batch.",
        "The experts, of which each token uses two, are divided.",
        "It has none.",
    ],
)
def test_a_sentence_that_reads_like_a_translation_is_found(sentence: str) -> None:
    """Task pages are read once, in a hurry."""
    assert len(list(idioms(Page("docs/training.md", sentence)))) == 1
    assert list(idioms(Page("docs/tour.md", sentence))) == [], "pages about the code come later"


def test_code_and_links_are_not_sentences() -> None:
    text = "`configs/forks/x.py` ([page](behind.md)) <!-- number: of_which -->3<!-- end -->"
    assert list(idioms(Page("docs/training.md", text))) == []


def test_few_phrases_are_kept_and_each_is_used() -> None:
    """The list of exceptions would otherwise grow until the check means nothing."""
    assert sum(map(len, KEPT.values())) <= 20
    texts = {page.name: page.text.lower() for page in PAGES}
    assert [(name, words) for name, kept in KEPT.items() for words in kept if words not in texts[name]] == []


def test_records_keep_dates_and_machines() -> None:
    text = "`python -m benchmarks.speed` · AMD EPYC, 2 cores · 2026-11-22"
    assert found(text, RESULT) == []
    assert len(found(text, PLANTED)) == 2


def test_examples_run_in_a_folder_of_their_own(tmp_path: Path) -> None:
    text = "\n".join(
        (
            in_fence("megacore -h > commands.txt", "grep plan commands.txt; ls", info="bash run"),
            "",
            in_fence("plan  …", "configs", "no such line", info="text"),
            in_fence("python launch/plan.py --config nowhere.json", info="bash run"),
        )
    )
    page = Page(PLANTED, text)
    first, second = failed_examples(page, tmp_path)
    assert str(first) == f"{PLANTED}:9: the commands before do not print this line: no such line"
    assert str(second).startswith(f"{PLANTED}:11: its commands end with status 2: config error: --config")
    assert (tmp_path / "commands.txt").is_file() and not (ROOT / "commands.txt").exists()


def test_here_documents_and_quotes_over_lines_are_one_command() -> None:
    fence = Fence(
        0, "bash", "", ("cat > a.json <<'EOF'", '{"it": "is"}', "EOF", "python -c 'a = 1", "b = 2'")
    )
    words = [(command.line, command.words, command.written) for command in commands(fence.lines, 1, {})]
    assert words == [(1, ["cat"], ["a.json"]), (4, ["python", "-c", "a = 1\nb = 2"], [])]
