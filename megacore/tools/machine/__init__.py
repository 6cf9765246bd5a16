"""Sets up a process for the machine that it runs on, before its first product: its device, threads,
memory, libraries, determinism.

In: a config and the rank's place. Out: the device. Whoever starts a run calls `device`; the core computes
alike without it.
"""
