"""Text and tokens: tokenizers, which run files of strangers in a process of their own, and text as a model writes it.

In: a tokenizer's name. Out: a `Tokenizer`.
"""
