"""Arrays of runs over settings: what is swept, their folder, running them here or
under Slurm, and what they found.
"""
