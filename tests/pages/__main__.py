"""The command line of the generated pages."""

import sys

import tests.pages
from megacore.tools.cli import Parser, exit_with
from tests.pages.registry import ROOT, current_texts, stale_pages
from tests.pages.results import problems


def parser() -> Parser:
    """The options."""
    parser = Parser("python -m tests.pages", tests.pages.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is stale")
    return parser


def main(argv: list[str]) -> int:
    """Write or check all generated pages; return the exit status."""
    args = parser().parse_args(argv)
    texts = current_texts()
    stale = stale_pages(texts)
    if args.check:
        stale += [f"benchmarks/results/{line}" for line in problems()]
        print(
            "\n".join(stale) or f"{len(texts)} generated pages are current",
            file=sys.stderr if stale else None,
        )
        return int(bool(stale))
    for path, text in texts.items():
        (ROOT / path).write_text(text, encoding="utf-8")
    print(f"wrote {len(stale)} of {len(texts)} generated pages")
    return 0


if __name__ == "__main__":
    exit_with(main)
