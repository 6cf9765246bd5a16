"""Finds phrases that read like a translation, in the README and the task pages.

Each phrase has what a native engineer would write. A page may keep a phrase where it is the right one: such
places are listed in `KEPT`, which a test holds short.
"""

import re
from collections.abc import Iterator

from tests.documents.pages import INLINE_CODE, Finding, Page

# The README and the pages that users read to do a task. Pages about the code are not held to this yet.
PAGES = {
    "README.md",
    "benchmarks/README.md",
    "kernels/README.md",
    "docs/README.md",
    "docs/data.md",
    "docs/install.md",
    "docs/migrating.md",
    "docs/models.md",
    "docs/operations.md",
    "docs/performance.md",
    "docs/planning.md",
    "docs/recipes.md",
    "docs/research.md",
    "docs/training.md",
}

# What a sentence may not say, and what it says instead.
INSTEAD = {
    r"go(es|ing)? on(?! to\b)": "resume, continue",
    r"behind": "after",
    r"beside": "next to, compared with, in addition to",
    r"(stands?|stood) (in|at|for|there|here)": "is in, is at",
    r"of (your|one's|its|their|his|our) own": "custom, or your own before the noun",
    r"(is|are|was|were|be|been) refused|refus(es?|ing|als?)": "is rejected with an error, raises",
    r"(messages?|errors?|lines?|reports?|logs?|programs?|scripts?) names": "reports, identifies",
    r"(is|are|was|were) named by": "reports, identifies",
    r"(is|are|was|were) said|says so": "is printed, is logged, is documented",
    r"whoever|somebody|nobody|who asks": "the component, or the passive voice",
    r"so (many|much)(?! (that|as)\b)|as many as there are": "n, the number of",
    r"a part of": "a fraction of",
    r"of which|those of|that of": "repeat the noun",
    r"is no(?! (longer|more|less|fewer|later|earlier|worse|better|slower|faster)\b)": "is not a",
    r"(has|have) none|there (is|are) none|is none|are none": "has no NOUN, there is no NOUN",
    r"(writes?|wrote|writing) (a )?texts?|texts? that (is|are) written": "generate text",
    r"(is|are) summed|sums": "reduce, all-reduce",
    r"rooms?|floors?|the house": "packages, layers",
    r"figures?": "metric, number",
    r"mixtures?": "MoE model, MoE layer; a weighted mix of corpora",
    r"forks?": "custom model, example model",
    r"hang doctor": "hang watchdog",
    r"crowds?|strangers?|wires?|wakes?": "oversubscribed CPU, untrusted peers, transport",
    r"it is as if|as is usual|in (its|their) place": "say which",
}
PHRASES = [(re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE), instead) for phrase, instead in INSTEAD.items()]

# Where a phrase is right, by page: the words around it, in lower case.
KEPT: dict[str, tuple[str, ...]] = {}


def text_of(line: str) -> str:
    """The words of a line that a reader reads: no code, link targets or comments."""
    without_code = INLINE_CODE.sub("`code`", line)
    without_targets = re.sub(r"\]\([^)]*\)", "]", without_code)
    return re.sub(r"<!--.*?-->|<[^>]*>", "", without_targets)


def idioms(page: Page) -> Iterator[Finding]:
    """Phrases of `INSTEAD` in the prose of a page that is held to them."""
    if page.name not in PAGES:
        return
    kept = KEPT.get(page.name, ())
    for number, line in page.prose:
        text = text_of(line)
        for words in kept:
            text = re.sub(re.escape(words), "", text, flags=re.IGNORECASE)
        for pattern, instead in PHRASES:
            for match in pattern.finditer(text):
                yield page.finding(number, f"{match[0]!r} (write: {instead})")
