"""megacore: 3D-parallel GPT pretraining, written to be read, changed and proved."""

__version__ = "0.1.0"
