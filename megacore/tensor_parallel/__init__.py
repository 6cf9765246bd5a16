"""Tensor-parallel layers, written by hand: column and row linear layers, embedding, cross entropy.

In: this rank's part of the features, or of the tokens (sequence parallelism). Out: the same of the result,
with the sums over tensor ranks done. Every parameter is made with its `Shard`.
"""
