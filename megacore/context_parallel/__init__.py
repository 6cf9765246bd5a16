"""Attention over sequences that are divided among ranks, and within documents."""
