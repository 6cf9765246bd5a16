"""Where parameters start in an engine's buffers, also for those who only count them and need no torch."""

ALIGNMENT = 64  # elements: every parameter starts on a boundary that vector loads and matrix units like
