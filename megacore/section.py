"""Sections of a config, and the types of their values.

Every section, those that optimizers bring included, is made of these.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from megacore.records import LARGEST

# Bounds far around any run: no number in a config may make a script count, wait or allocate without end, or
# compute with infinities.
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(gt=0, le=LARGEST)]
MOST_RANKS = 2**20
Ranks = Annotated[int, Field(gt=0, le=MOST_RANKS)]
Width = Annotated[int, Field(gt=0, le=2**20)]  # heads, or features of one token
Rows = Annotated[int, Field(gt=0, le=2**28)]  # of a table, or of a wide matrix
Positions = Annotated[int, Field(gt=0, le=2**31)]
NonNegative = Annotated[float, Field(ge=0.0, le=1e6)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6)]
Epsilon = Annotated[float, Field(ge=1e-30, le=1.0)]
Seconds = Annotated[float, Field(ge=1e-3, le=1e8)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


class Section(BaseModel):
    """A section refuses unknown keys and does not coerce types (`"20"` is not 20)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
