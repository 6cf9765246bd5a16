"""Token files, the order of samples, and what each sample holds.

In: token files on disk. Out: the tokens of any sample of a run, computed from the config alone, alike in
every layout.
"""
