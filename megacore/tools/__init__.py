"""What a run can do without.

The core imports nothing from here; whoever starts a run attaches what it wants.
"""
