"""What one GPU can show in half an hour: `python3 -m benchmarks.gpu SLICE --out FOLDER`.

Four slices, each of parts that run in processes of their own, one after the other. `__main__` is the command line, `wheels` brings
packages that a bare machine lacks, `parts` lists what runs and for how long, and `running` runs it and writes it down as it goes.
What is measured stands in `right`, `kernels`, `speed` and `choices`.
"""
