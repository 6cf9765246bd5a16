"""Pipeline schedules as data, and the one runtime that runs them.

In: a config. Out: a `Plan`, each rank's actions in order, which is run as tools have checked and drawn it.
Only `runtime.py` needs torch.
"""
