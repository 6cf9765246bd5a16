"""Where a process stands among all ranks: the mesh of named axes, its groups, their collectives, and how
parameters are placed on them.

In: a config and the launcher's environment. Out: a `Mesh`, which layers, engines and the runtime are given.
"""
