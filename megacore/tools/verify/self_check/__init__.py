"""Checks one process of a model against itself, in fp64: what every layout shares with the reference, and a
comparison of the two therefore cannot see.

case.py       the small model, its microbatches, its losses and its logits
finding.py    what a check reports
gradient.py   backward against differences of the loss
passes.py     no look-ahead, additive losses, repeatable passes, training equal to evaluation
generation.py text that is read in pieces through the cache
export.py     the exported model in transformers
state.py      settings by step, evaluation that changes nothing, resume that loses nothing
run.py        runs all of them in order; report.py says it in lines
"""
