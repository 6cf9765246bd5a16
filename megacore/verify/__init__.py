"""Proof that a layout computes what one process does: gradients, parameters, moments, losses, tensor by tensor.

shrink.py      a config made small, its structure kept           layouts.py   names such as tp2pp2dp2sp
reference.py   the same steps written out plainly, in fp64, on one process
record.py      what a layout computes: the real trainer on real ranks (worker.py, workers.py), its tensors to files
trace.py       the same with every module's activations and their gradients
replay.py      in 16 bits, what a run should have made of its own numbers
flight.py      what a rank had under way, should two runs of a layout differ
compare.py     differences of records; bounds.py which of them are rounding; locate.py the first place where two traces part
run.py         all of it in order; report.py the table and the verdict
"""
