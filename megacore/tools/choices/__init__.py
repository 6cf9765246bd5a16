"""What a run's open settings become, before its first step: the stages of the model,
and whatever stands on `auto`.

Whoever starts a run calls `partition.partitioned` before there is a mesh, and `run.trainer_of` on it; for
stages without a run there is `settle.settled_alone`. The core reads what was chosen, a config's plain values
and its `Partition`, and knows none of the costs by which it was; where nobody has chosen, it says so. The
costs (operations, activations, links, measured steps) stand here, below the planner, which predicts with the
same.
"""
