"""The libraries that megacore is compared with, each driven by a loop of its own: see
`python -m benchmarks.peers -h`.
"""
