"""Tensor-parallel layers, written by hand. Each takes the group that it needs."""
