"""GPT models, written once in parallel layers: one device is the smallest mesh, and not another model.

In: a batch's tokens, or what the stage before hands on. Out: what the next stage reads, losses, or logits.
"""
