"""What every worker needs: imported once, by the process from which all of them are forked."""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # before torch and DeepSpeed are imported

import torch._dynamo  # noqa: F401  (recomputation and the first backward want it, or a part of it)

import tests.training  # noqa: F401
from megacore.distributed import shared_memory

# ranks that look ten times as often whether others have come take the cores from those
shared_memory.PAUSE = 5e-4
