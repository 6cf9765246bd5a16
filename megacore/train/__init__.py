"""One training step, the loop around it, and the checkpoints of a run.

In: a config, a mesh and opened inputs. Out: a trained model's checkpoints, and a line of metrics for each
logged step. Start reading at `trainer.Trainer.run`, then `step.TrainStep.__call__`.
"""
