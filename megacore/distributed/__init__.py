"""The place of a process among all ranks, the mesh of named axes, its groups and their collectives."""
