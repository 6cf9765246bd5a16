"""Imported last, by a process that tests are run in or that workers are forked from: what is
there is no garbage, and stays.

A run begins with two looks of the garbage collector at all objects: a million that imports have made, which
takes longer than its steps here, and copies the memory that a forked worker shares. For good: a run ends with
`gc.unfreeze`.
"""

import atexit
import gc

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # some libraries complain of whatever is there when the interpreter has ended
gc.freeze = gc.unfreeze = lambda: None
