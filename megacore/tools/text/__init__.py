"""Text and tokens: tokenizers, which run files of strangers in a process of their
own, and text that a model writes.

In: a tokenizer's name, or a model's stages and a prompt. Out: a `Tokenizer`, or the tokens that follow.
"""
