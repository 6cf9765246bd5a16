"""Watches a run from within: notes what each rank begins, explains hangs, names stragglers,
notices hosts that fall silent.

In: what the core tells its listeners. Out: one line that names the rank and the reason.
"""
