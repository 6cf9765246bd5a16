"""The layouts in which experts are proved: a pairwise cover, and the table of what was found in them."""

import json
from itertools import product

from tests.expert_rows import CHOICES, proofs
from tests.experts import FOUND
from tests.pairwise import cover, pairs_of


def test_every_pair_that_is_allowed_is_in_a_row() -> None:
    """A pair that is left out is proved nowhere; one that no row may have must be named
    and not looked for.
    """
    rows = list(product("abc", "xyz", "12", "uv"))
    chosen, never = cover(rows, lambda row: row[:2] != ("a", "x"))
    assert never == {(0, "a", 1, "x")} and len(chosen) < 16 < len(rows)
    assert {pair for row in chosen for pair in pairs_of(row)} == {
        pair for row in rows for pair in pairs_of(row)
    } - never


def test_the_table_is_of_this_cover() -> None:
    """A change of what a run accepts, or of what can be chosen, calls for another proof."""
    chosen, never = proofs()
    rows = [record["row"] for record in json.loads(FOUND.read_text(encoding="utf-8"))]
    assert rows == [[proof.layout.name, *(proof.of[name] for name in CHOICES)] for proof in chosen]
    assert not never
    settings = [[proof.of[name] for name in CHOICES] for proof in chosen]
    for (i, some), (j, others) in product(enumerate(CHOICES.values()), repeat=2):
        assert i >= j or {(row[i], row[j]) for row in settings} == set(product(some, others))
