"""The section `optim`: what all optimizers share, each one's own settings, and groups of parameters."""

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer
from pydantic.fields import FieldInfo

import megacore.optimizers.every  # noqa: F401 (whose settings are keys of `optim`)
from megacore.optimizers.adamw import AdamWSettings
from megacore.optimizers.rule import RULES, on_register
from megacore.optimizers.sgd import SGDSettings
from megacore.section import Count, NonNegative, Section, Whole


class OptimGroup(Section):
    """Settings of the parameters that it matches.

    What it leaves open is as in `optim`. It has the keys of all rules' settings too.
    """

    match: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = Field(
        description="patterns of parameters' names, such as blocks.*.attention.qkv.weight; the first "
        "entry that matches decides"
    )
    kind: str | None = None  # the names in `RULES`, see `take_in_rules`
    lr: NonNegative | None = None
    weight_decay: NonNegative | None = None

    @model_serializer(mode="wrap")
    def _without_what_is_open(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}


class OptimSchedule(Section):
    """What all optimizers share."""

    kind: str = Field(
        "adamw",
        description="a rule of megacore/optimizers; sgd has momentum; all have decoupled weight decay",
    )
    lr: NonNegative = 3e-4
    min_lr: NonNegative = 0.0
    warmup_steps: Whole = 0
    warmup: Literal["linear", "log"] = Field(
        "linear", description="log: the rate grows with the logarithm of the step, as DeepSpeed's do"
    )
    warmup_lr: NonNegative = Field(0.0, description="the rate that warmup begins from")
    decay_steps: Count | None = Field(
        None,
        description="cosine, linear: the step that reaches min_lr (null: train.steps); wsd: length of the "
        "last decay (null: a tenth)",
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    lag: tuple[Whole, Whole] = Field(
        (0, 0), description="steps by which warmup and decay are late, as in libraries that count from 0"
    )
    weight_decay: NonNegative = Field(0.1, description="on matrices only: not on biases, norms")
    groups: tuple[OptimGroup, ...] = Field(
        (),
        description="a list of {match, and a rule or settings of its own}, for the parameters that a "
        "pattern in `match` names",
    )
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None,
        description="decay rate of a mean of the weights, such as 0.999, which validation and exports "
        "use; null: there is none",
    )
    grad_clip: NonNegative = Field(1.0, description="bound on the global gradient norm; 0: no clipping")
    spike_threshold: Annotated[float, Field(ge=1e-3, le=1e12)] | None = Field(
        None,
        description="skip a step whose gradient norm exceeds the median of the last 128 by more than this "
        "many robust deviations "
        "(1.4826 × the median absolute deviation), say 10; null: skip only what is not finite",
    )
    max_skips: Count = Field(
        100, description="after so many skipped steps in a row the run rolls back, or fails"
    )
    max_rollbacks: Whole = Field(
        0,
        description="how often a run may go back to its last checkpoint and on from there with the "
        "samples behind the skipped ones",
    )


class OptimConfig(SGDSettings, AdamWSettings, OptimSchedule):
    """The section `optim`: what all optimizers share, and each one's own settings."""


_OPTIM, _ENTRY = dict(OptimConfig.model_fields), dict(OptimGroup.model_fields)  # without rules' settings


def take_in_rules() -> None:
    """Gives `optim`, and entries of `optim.groups`, the names and the settings of
    all rules that are registered.
    """
    kinds: Any = Literal[tuple(RULES)]
    fields, entry = OptimConfig.__pydantic_fields__, OptimGroup.__pydantic_fields__
    for held, own in ((fields, _OPTIM), (entry, _ENTRY)):
        held.clear()
        held.update(own)
    fields["kind"] = FieldInfo.merge_field_infos(fields["kind"], annotation=kinds)
    entry["kind"] = FieldInfo.from_annotation(kinds | None)
    entry["kind"].default = None
    for rule in RULES.values():
        for key, field in rule.settings_type.model_fields.items():
            assert key not in OptimSchedule.model_fields, (
                f"{rule.name} has a setting called {key}, and so has every optimizer"
            )
            fields[key] = field
            bounded: Any = (
                Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            )
            of_entry: Any = bounded | None
            entry[key] = FieldInfo.from_annotated_attribute(of_entry, None)
    for section in (OptimGroup, OptimConfig):
        section.model_rebuild(force=True)


on_register(take_in_rules)
