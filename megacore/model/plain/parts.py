"""The table that says what each part of a plain module is: which tensor ranks divide, and where they meet.

    PARTS = {"attn": "region", "attn.c_attn": "column/3", "attn.c_proj": "row", "attn.n_embd": "divide", …}

Keys are patterns (`fnmatch`) of places in a block, such as ``self_attn.[qkv]_proj``. What they can be:

    region          a module within which each rank computes a part, from its columns to its rows
    sum             a region without a row at its end: the ranks' outputs are summed
    whole           a module that needs all tokens, and which every rank computes whole
    column          a linear module with outputs of this rank; column/3: three of them in one, such as q, k, v
    row             a linear module with inputs of this rank
    split D         a bare parameter, along dim D; split D/2: two of them in one along that dim
    divide          an attribute that counts features or heads, of which a rank has a part
    blocks, embedding, head   places in the module itself, if they cannot be found: the list of blocks, the
                    table of tokens, and the linear module that makes logits
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

ENDS = ("blocks", "embedding", "head")
REGIONS = ("region", "sum", "whole")
LINEAR = ("column", "row")
DIVIDED = (*LINEAR, "split")
ROLE = re.compile(
    r"(region|sum|whole|row|divide|blocks|embedding|head|column(?:/(\d+))?|split (\d+)(?:/(\d+))?)"
)
RIGHT = "region, sum, whole, column, column/3, row, split 1, split 1/2, divide, blocks, embedding or head"

# By `base_model_tp_plan` of transformers. A norm of each head's features is whole, and so needs no entry.
STYLES = {"colwise": "column", "rowwise": "row"}
BARE_STYLES = {"packed_colwise": "split 1/2", "rowwise": "split 2"}  # of experts' weights [expert, out, in]
# Of classes that come without a plan, by `model_type`.
TABLES = {
    "gpt2": {
        "attn": "region",
        "attn.c_attn": "column/3",
        "attn.c_proj": "row",
        "attn.split_size": "divide",
        "mlp": "region",
        "mlp.c_fc": "column",
        "mlp.c_proj": "row",
    }
}


@dataclass(frozen=True)
class Role:
    """What a part of a module is: its `kind`, and for a column or a split how many there are in one."""

    kind: str = ""
    sections: int = 1
    dim: int = 0


@dataclass(frozen=True)
class Parts:
    """A table, and what it says of a part of a block by its place there."""

    table: Mapping[str, str]

    def __post_init__(self) -> None:
        for pattern, text in self.table.items():
            if not ROLE.fullmatch(text):
                raise ValueError(f"{pattern!r} is {text!r}, which is not a kind of part: {RIGHT}")

    def role(self, place: str) -> Role:
        """Return what the part of a block at `place` is."""
        for pattern, text in self.table.items():
            if text not in ENDS and fnmatchcase(place, pattern):
                return role_of(text)
        return Role()

    def end(self, kind: str) -> str | None:
        """Return the place of the blocks, the embedding or the head, if the table says it."""
        return next((place for place, text in self.table.items() if text == kind), None)

    def enclosing(self, place: str) -> str | None:
        """Return the kind of the region that holds `place`, or is it; None outside of all regions."""
        names = place.split(".")
        for length in range(1, len(names) + 1):
            kind = self.role(".".join(names[:length])).kind
            if kind in REGIONS:
                return kind
        return None

    def check_places(
        self, modules: Collection[str], parameters: Collection[str], numbers: Collection[str]
    ) -> None:
        """Raise `ValueError` if a pattern fits none of the blocks' modules, bare parameters or numbers,
        whichever its kind is about, or if patterns before it take all that it fits.
        """
        earlier: list[str] = []
        for pattern, text in self.table.items():
            if text in ENDS:
                continue
            noun, places = "module", modules
            if role_of(text).kind == "divide":
                noun, places = "integer", numbers
            elif role_of(text).kind == "split":
                noun, places = "parameter", parameters

            entry = f"{pattern!r} is {text!r} in the table"
            fitting = [place for place in places if fnmatchcase(place, pattern)]
            if not fitting:
                known = ", ".join(sorted(places)) or "none"
                raise ValueError(f"{entry}, and no {noun} of a block has that place, of {known}")
            if all(any(fnmatchcase(place, other) for other in earlier) for place in fitting):
                raise ValueError(
                    f"{entry}, and patterns before it take all that it fits; the first one counts"
                )
            earlier.append(pattern)

    def check_planned_sums(self, modules: Collection[str], parameters: Collection[str]) -> None:
        """Raise `ValueError` if a sum has more than experts and a router that each rank computes whole.

        A plan of transformers leaves out shared experts, whose output would be added once for each rank.
        """
        for place in modules:
            if self.role(place).kind != "sum":
                continue
            whole = dict[str, None]()
            for parameter in parameters:
                owner = parameter.rpartition(".")[0]
                is_divided = self.role(parameter).kind in DIVIDED or self.role(owner).kind in DIVIDED
                if parameter.startswith(f"{place}.") and not is_divided:
                    child = parameter.removeprefix(f"{place}.").partition(".")[0]
                    whole[child] = None
            if len(whole) > 1:
                raise ValueError(
                    f"{place} has {', '.join(sorted(whole))}, which the class's plan leaves whole, and only "
                    "a router may be"
                )

    def check_regions(self, modules: Collection[str], parameters: Collection[str]) -> None:
        """Raise `ValueError` if a region is in another or has nothing to sum, or if ranks divide a part that
        is in no region.
        """
        for place in modules:
            kind = self.role(place).kind
            if kind not in REGIONS:
                continue
            outer = self.enclosing(place.rpartition(".")[0]) if "." in place else None
            if outer is not None:
                raise ValueError(
                    f"{place} is a {kind} in a {outer}: its ranks would exchange twice; one of them is enough"
                )
            names = (*modules, *parameters)
            inner = {self.role(name).kind for name in names if name.startswith(f"{place}.")}
            if kind == "sum" and inner.isdisjoint(("column", "row", "split")):
                raise ValueError(f"{place} is a sum, and no rank has a part of what is in it: is it whole?")
            if kind == "region" and "row" not in inner:
                raise ValueError(
                    f"{place} is a region without a row, which would sum what its ranks computed; a region "
                    "whose output they sum is a sum, and one that no rank divides is whole"
                )
        for place in (*modules, *parameters):
            kind, region = self.role(place).kind, self.enclosing(place)
            if kind in DIVIDED and region not in ("region", "sum"):
                where = "outside of all regions" if region is None else f"in a {region}"
                raise ValueError(f"{place} is a {kind} {where}: its ranks' parts would not be put together")


def role_of(text: str) -> Role:
    """Return the role that a table's text names."""
    match = ROLE.fullmatch(text)
    assert match is not None, "checked when the table was made"
    columns, dim, splits = match.group(2, 3, 4)
    kind = re.split("[ /]", text)[0]
    return Role(kind, int(columns or splits or 1), int(dim or 0))


def parts_of_plan(plan: Mapping[str, str], called: str) -> dict[str, str]:
    """Return the table of a transformers class by its own plan, ``{"layers.*.mlp.up_proj": "colwise", …}``.

    Raises `ValueError` for a style that is not known. `called`: the class, for messages.
    """
    table: dict[str, str] = {}
    for path, style in plan.items():
        place = path.partition("*.")[2]
        parent = place.rpartition(".")[0]
        if style == "replicated_with_grad_allreduce":
            continue
        if style == "moe_tp_experts":  # the experts are a part of the layer that also has the router
            table[parent] = "sum"
        elif parent.endswith("experts") and style in BARE_STYLES:
            table[place] = BARE_STYLES[style]
        elif style in STYLES:
            table[place] = STYLES[style]
            table.setdefault(parent, "region")
        else:
            raise ValueError(f"the plan of {called} divides {path} as {style!r}, which is not known here")
    return table
