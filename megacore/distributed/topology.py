"""Where a rank stands among the named axes, and who is in its groups.

Nothing is connected here: `mesh.Mesh` does that.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from megacore.config import Config
from megacore.distributed.axes import AXES, EXPERT_AXES, Axis, coordinates, place_text, ranks_along
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.hierarchical_reduce import GradientSum, Levels
from megacore.distributed.shard import AxisPlacement, Shard
from megacore.pipeline.partition import placement_of, shared_parameters


def sizes_of(
    config: Config, axes: Sequence[Axis] = AXES, others: Mapping[str, int] | None = None
) -> dict[str, int]:
    """How many ranks each axis has. `others` has the sizes of axes that `config.parallel` does not have."""
    return {
        axis.name: (others or {}).get(axis.name) or (config.expert_sizes | config.sizes)[axis.name]
        for axis in axes
    }


class Topology:
    """A rank's coordinates along the axes, and its groups.

    It is all that layers need to be built, on one process for any rank.

    `group("dp", "tp")` is the group along a product of axes. The ranks of a stage may be seen in several
    ways, such as dp × cp × tp and
    edp × ep × etp: each view has its axes, and a parameter is placed, copied and summed along those of one
    view.
    """

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        axes: Sequence[Axis] = AXES,
        sizes: Mapping[str, int] | None = None,
        views: Sequence[Sequence[Axis]] = (),
    ) -> None:
        """`axes`: those of most layers, and of data.

        `views`: further ones of the same ranks; a model with experts has `EXPERT_AXES` anyway.

        `sizes`: see `sizes_of`.
        """
        expert_views = () if config.model.num_experts is None else (EXPERT_AXES,)
        self.rank, self.axes, self.views = rank, axes, (axes, *expert_views, *views)
        self.sizes_of_views = [sizes_of(config, view, sizes) for view in self.views]
        self.sizes = self.sizes_of_views[0]
        assert len({prod(sizes.values()) for sizes in self.sizes_of_views}) == 1, (
            "every view must have all ranks"
        )
        self.coordinates = {
            name: at for sizes in self.sizes_of_views for name, at in coordinates(rank, sizes).items()
        }
        self.shard_size = config.shard_size
        self.groups: dict[tuple[str, ...], Group] = {}
        self._create_groups(config)

    def group(self, *axes: str) -> Group:
        """The group of this rank along a product of axes."""
        axes = self._several(axes)
        if axes not in self.groups:
            self.groups[axes] = self._create("×".join(axes), self._ranks_along(axes))
        return self.groups[axes]

    @property
    def tp(self) -> Group:
        """The tensor ranks, which divide every layer's products."""
        return self.group("tp")

    @property
    def pp(self) -> Group:
        """The pipeline's ranks."""
        return self.group("pp")

    @property
    def cp(self) -> Group:
        """The context ranks, which divide the tokens of every sequence."""
        return self.group("cp")

    @property
    def sample_group(self) -> Group:
        """The ranks that read different samples."""
        return self.group(*(axis.name for axis in self.axes if axis.samples))

    @property
    def gradient_group(self) -> Group:
        """The ranks that hold copies of the same parameters, compute on different
        tokens, and sum gradients.
        """
        return self.group(*self.token_axes)

    @property
    def model_group(self) -> Group:
        """The ranks that together hold one copy of the model, and compute on the same tokens."""
        return self.group(*(axis.name for axis in self.axes if not axis.tokens))

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes along which tokens are divided."""
        return tuple(axis.name for axis in self.axes if axis.tokens)

    @property
    def is_loss_rank(self) -> bool:
        """Whether this rank's losses count. Of the ranks that compute on the same tokens, only one does."""
        return self.counts()

    def counts(self, *divided: str) -> bool:
        """Whether this rank's part of a sum over all ranks counts: of those that compute the same, only one
        does. `divided`: the axes along which they compute parts, besides those of tokens and layers.
        """
        alike = (axis.name for axis in self.axes if not (axis.tokens or axis.layers or axis.name in divided))
        return not any(self.coordinates[name] for name in alike)

    @property
    def coordinates_text(self) -> str:
        """This rank's coordinates as text, such as `pp 0, dp 1, tp 0`."""
        return place_text(self.rank, self.sizes, self.axes)

    def placed(self, shard: Shard, name: str | None = None) -> Shard:
        """Completes a layer's record: along all other axes the parameter is a copy, and along those that
        divide tokens its gradient is a part of a sum. So it is along the ranks whose stages share the
        parameter of this `name`: its name stands for an axis.
        """
        if name in self.shared and name not in {along.axis for along in shard.along}:
            holders = self.shared[name]
            shard = replace(
                shard, along=(*shard.along, AxisPlacement(name, holders.rank, holders.size, partial=True))
            )
        stated = {along.axis for along in shard.along}
        view = self._view(stated)
        sizes = self.sizes_of_views[view]
        copied = [
            axis
            for axis in self.views[view]
            if axis.name not in stated and not axis.layers and sizes[axis.name] > 1
        ]
        states = (
            AxisPlacement(a.name, self.coordinates[a.name], sizes[a.name], partial=a.tokens) for a in copied
        )
        return replace(shard, along=(*shard.along, *states))

    def gradient_sum(self, shard: Shard) -> GradientSum:
        """Over which ranks the gradient of a parameter with this completed record is summed."""
        view = self.views[self._view(along.axis for along in shard.along)]
        # each rank has the gradient of what it holds
        whole = {along.axis for along in shard.along if not along.partial}
        tokens = tuple(axis.name for axis in view if axis.tokens and axis.name not in whole)
        first = tuple(
            self.group(axis.name) for axis in view if axis.name in shard.partial_over and not axis.tokens
        )
        last = next((self.shared[name] for name in shard.partial_over if name in self.shared), None)
        return GradientSum(tokens, self.levels_along(*tokens), first, last)

    def axes_beside(self, shard: Shard) -> tuple[str, ...]:
        """The axes of a stage's ranks along which the gradient of a parameter with this completed
        record is not summed over tokens.
        """
        view, tokens = (
            self.views[self._view(along.axis for along in shard.along)],
            self.gradient_sum(shard).tokens,
        )
        return tuple(axis.name for axis in view if not axis.layers and axis.name not in tokens)

    def shard_at(self, shard: Shard, rank: int) -> Shard:
        """The completed record of the same parameter on another rank of the stage."""
        at = {name: i for sizes in self.sizes_of_views for name, i in coordinates(rank, sizes).items()}
        return replace(
            shard, along=tuple(replace(along, index=at.get(along.axis, along.index)) for along in shard.along)
        )

    def owner_index(self, rank: int, axes: Sequence[str]) -> int:
        """Which part of what the ranks along `axes` divide a rank owns (`Levels.owners`)."""
        return ranks_along(axes, rank, self.sizes_of_views[self._view(axes)]).index(rank)

    def levels_along(self, *axes: str) -> Levels:
        """The ranks along a product of axes, as they sum gradients."""
        return Levels(SOLO, self.group(*axes) if axes else SOLO)

    def _view(self, names: Iterable[str]) -> int:
        """The first view that has these axes."""
        known = {axis.name for view in self.views for axis in view} & {*names}
        found = [view for view, sizes in enumerate(self.sizes_of_views) if known <= sizes.keys()]
        assert found, f"no view of the ranks has all of {sorted(known)}"
        return found[0]

    def _several(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes of a product that have several ranks, or else its first: groups of the
        same ranks are one, with one name.
        """
        if axes[0] in ("shard", "replicate", "holders"):
            return axes
        sizes = self.sizes_of_views[self._view(axes)]
        return tuple(axis for axis in axes if sizes.get(axis) != 1) or axes[:1]

    def _ranks_along(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks along some axes.

        The fsdp engine divides the ranks of a sum into `shard` and `replicate`: neighbours, which are on one
        node, hold shards of one copy, so frequent gathers stay within a node.
        """
        if axes[0] in ("shard", "replicate"):
            ranks = self._ranks_along(axes[1:] or self.token_axes)
            at, size = (
                ranks.index(self.rank),
                self.shard_size if len(ranks) % self.shard_size == 0 else len(ranks),
            )
            return (
                ranks[at - at % size : at - at % size + size]
                if axes[0] == "shard"
                else ranks[at % size :: size]
            )
        # the ranks that together hold a copy: the shards of all ranks along the axes that divide no tokens
        if axes[0] == "holders":
            product = axes[1:] or self.token_axes
            view = self._view(product)
            beside = [axis.name for axis in self.views[view] if not axis.layers and axis.name not in product]
            sizes, shard = self.sizes_of_views[view], self._ranks_along(("shard", *axes[1:]))
            return tuple(sorted(other for rank in shard for other in ranks_along(beside, rank, sizes)))
        return ranks_along(axes, self.rank, self.sizes_of_views[self._view(axes)])

    def _create(self, name: str, ranks: tuple[int, ...]) -> Group:
        """Makes a group of these ranks."""
        return Group(name, ranks, ranks.index(self.rank))

    def _holders(self, config: Config) -> dict[str, tuple[int, ...]]:
        """The ranks of this pipeline that hold a parameter which stages share, by its name, where
        they are several; in one order.
        """
        pipeline = self._ranks_along(("pp",))
        if len(pipeline) == 1:
            return {}
        where = {
            stage: pipeline[rank] for rank, stages in enumerate(placement_of(config)) for stage in stages
        }
        found = {
            name: tuple(sorted({where[stage] for stage in stages}))
            for name, stages in shared_parameters(config).items()
        }
        return {name: ranks for name, ranks in found.items() if len(ranks) > 1}

    def _create_groups(self, config: Config) -> None:
        """Makes the groups that do not wait until somebody asks for them."""
        holders = self._holders(config)
        self.shared = {
            name: self._create(f"tied {name}", ranks) for name, ranks in holders.items() if self.rank in ranks
        }


def fsdp_products(
    product: tuple[str, ...], usual: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the groups into which the fsdp engine divides the ranks of a sum;
    those of the `usual` sum are short.
    """
    which = () if product == usual else product
    return ("shard", *which), ("replicate", *which)


def fsdp_holders(product: tuple[str, ...], usual: tuple[str, ...]) -> tuple[str, ...]:
    """The name of the group of the ranks that together hold one copy of a parameter with
    that sum, under the fsdp engine.
    """
    return "holders", *(() if product == usual else product)


def alone(config: Config) -> Topology:
    """One process that holds all, whatever `config.parallel` says: for whole models."""
    return Topology(config, sizes={axis.name: 1 for axis in (*AXES, *EXPERT_AXES)})
