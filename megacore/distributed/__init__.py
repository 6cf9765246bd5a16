"""Where a process stands among all ranks, the mesh of named axes, its groups and their operations."""
