"""Predicts a run without its devices: memory, traffic, step time and cost, and searches for the best layout.

In: a config, and files about devices and links. Out: figures, tables and pictures (`launch/plan.py`).
"""
