"""What one GPU can show in 34 minutes: `python3 -m benchmarks.gpu SLICE --output FOLDER`.

Five slices, each of parts that run in their own processes. `__main__` is the command line, `parts` lists what
runs and for how long, `running` runs it, and `report` and `summary` write down what it finds. `prepare`, with
`compile_ahead`, fetches and compiles what a bare machine lacks; `wheels` and `caches` put it in place there.
`before` compares two checkouts. What is measured is in `first`, `right`, `kernels`, `speed` and `choices`.
"""
