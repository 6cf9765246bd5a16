"""Pipeline schedules as data, and the one runtime that runs them.

In: a config. Out: a `Plan`, each rank's actions in order, which is validated, simulated, drawn and run. Only `runtime.py` needs torch.
"""
