"""Optimizers: each is a rule in a file of its own, with its settings, its state, its
update and its part of the proof.

In go a parameter's gradient and state, out come an update at a rate of one and the next state.
`config/optim_groups.py` says which rule a parameter has, and `engine/optimizers.py` applies it. A file here
is read with the config, before torch is imported.
"""
