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
    """Settings of the parameters that an entry of `optim.groups` matches.

    Keys that are not set have their value in `optim`. An entry also takes the settings of every optimizer.
    """

    match: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = Field(
        description="patterns of parameter names, such as `blocks.*.attention.qkv.weight`; a parameter "
        "belongs to the first entry with a matching pattern"
    )
    # `take_in_rules` narrows the type to the names in `RULES`
    kind: str | None = Field(None, description="optimizer of these parameters; null: `optim.kind`")
    lr: NonNegative | None = Field(
        None,
        description="peak learning rate of these parameters, which follows the schedule of `optim`; null: "
        "`optim.lr`",
    )
    weight_decay: NonNegative | None = Field(
        None, description="weight decay of these parameters; null: `optim.weight_decay`"
    )

    @model_serializer(mode="wrap")
    def _without_what_is_open(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}


class OptimSchedule(Section):
    """What all optimizers share."""

    kind: str = Field("adamw", description="optimizer; all use decoupled weight decay; see docs/research.md")
    lr: NonNegative = Field(3e-4, description="peak learning rate, reached at the end of warmup")
    min_lr: NonNegative = Field(0.0, description="learning rate at the end of the decay")
    warmup_steps: Whole = Field(0, description="steps of learning-rate warmup; 0: none")
    warmup: Literal["linear", "log"] = Field(
        "linear",
        description="shape of the warmup: linear in the step, or logarithmic as in DeepSpeed's schedulers",
    )
    warmup_lr: NonNegative = Field(0.0, description="learning rate at the start of warmup")
    decay_steps: Count | None = Field(
        None,
        description="cosine and linear: the step at which `min_lr` is reached, null: `train.steps`; wsd: "
        "length of the final decay in steps, null: a tenth of `train.steps`",
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="learning-rate schedule after warmup; wsd: constant, then a linear decay over the "
        "last `decay_steps` steps",
    )
    lag: tuple[Whole, Whole] = Field(
        (0, 0),
        description="steps by which warmup and decay are delayed, for libraries that count steps from 0",
    )
    weight_decay: NonNegative = Field(
        0.1, description="decoupled weight decay; applies to matrices only, not to biases and norms"
    )
    groups: tuple[OptimGroup, ...] = Field(
        (),
        description="parameter groups: a list of objects with `match` and the settings that differ for "
        "the matching parameters; see docs/engines.md",
    )
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None,
        description="decay rate per step, such as 0.999, of an exponential moving average of the weights, "
        "which validation and exports then use; null: no average",
    )
    grad_clip: NonNegative = Field(1.0, description="maximum global gradient norm; 0: no clipping")
    spike_threshold: Annotated[float, Field(ge=1e-3, le=1e12)] | None = Field(
        None,
        description="skip a step whose gradient norm exceeds the median of the last 128 steps by more "
        "than this many robust deviations (1.4826 × the median absolute deviation), such as "
        "10; null: skip only steps whose loss or gradient is not finite",
    )
    max_skips: Count = Field(
        100,
        description="number of consecutive skipped steps after which the run rolls back, or fails if no "
        "rollback is left",
    )
    max_rollbacks: Whole = Field(
        0,
        description="number of times a run may return to its last checkpoint and continue with the "
        "samples after the skipped ones",
    )


class OptimConfig(SGDSettings, AdamWSettings, OptimSchedule):
    """The optimizer, its learning-rate schedule, and the handling of bad gradients."""


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
    entry["kind"] = FieldInfo.merge_field_infos(entry["kind"], annotation=kinds | None)
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
