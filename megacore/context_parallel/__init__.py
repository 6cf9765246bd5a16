"""Attention over sequences that context ranks divide, and within documents.

In: queries, keys and values of this rank's tokens. Out: what attention over the whole sequence gives for
these tokens.
"""
