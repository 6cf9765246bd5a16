"""Starts runs again (`launch/supervise.py`): on the hosts that are left, from the newest checkpoint.

In: a launcher's command. Out: its last exit status.
"""
