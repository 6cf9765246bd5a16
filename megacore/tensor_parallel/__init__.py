"""Tensor-parallel layers, written by hand: each takes the group that it needs."""
