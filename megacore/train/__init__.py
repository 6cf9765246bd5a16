"""One training step, the loop around it, and what a run keeps on disk.

In: a config, a mesh and opened inputs. Out: a trained model's checkpoints, and a line of metrics for each
logged step.
"""
