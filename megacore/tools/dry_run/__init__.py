"""Runs single ranks of a mesh of any size, without its devices: the real code on
tensors that hold nothing.
"""
