"""Scaling laws: fits of finished runs, and the config that a budget of compute should be spent on."""
