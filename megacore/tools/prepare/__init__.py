"""Turns text and conversations into token files (`launch/prepare.py`).

In: files that a user names. Out: token files whole, or none.
"""
