"""Who sums gradients and updates weights: the native engine, FSDP2, or one that a tool attaches,
behind one seam (`protocol.Engine`).

In: stages whose backward has run. Out: updated parameters, and a checkpoint's tensors by their logical names.
"""
