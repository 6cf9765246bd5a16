"""What every worker needs: imported once, by the process from which all of them are forked."""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # before torch and DeepSpeed are imported

import torch.fx.experimental.symbolic_shapes  # noqa: F401  (the first backward wants it)

import tests.training  # noqa: F401
