"""Proves that a layout computes what one process does: gradients, parameters,
moments and losses, tensor by tensor.

shrink.py      makes a config small and keeps its structure          layouts.py   reads names such as
               tp2pp2dp2sp
reference.py   does the same steps in plain code, in fp64, on one process
untouched.py   lets a plain module compute them, which shares no code with megacore's layers
record.py      runs the real trainer on real ranks (worker.py, workers.py), and writes its tensors to files
trace.py       records every module's activations and their gradients
replay.py      in 16 bits, computes in fp64 what a run should have made of its own numbers
flight.py      notes what a rank had under way, for two runs of a layout that differ
compare.py     compares records; tolerances.py says which differences are rounding; first_divergence.py finds
               where two traces first differ
self_check/    checks one process against itself, which a comparison with the reference cannot
run.py         does all of it in order; proof_report.py prints the table and the verdict
"""
