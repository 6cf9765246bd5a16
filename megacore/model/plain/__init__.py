"""Plain PyTorch modules, such as models of transformers, as layers of megacore.

The module's own code computes. A table says which of its parameters tensor ranks divide; each rank then
holds its pieces of them, and the module's blocks become layers that a pipeline may cut. Only models of
`model.hf`, or of a `model.source` with a table `PARTS`, load this package.
"""
