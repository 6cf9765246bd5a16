"""Keeps runs going: a supervisor restarts them, a doctor explains hangs, and drills prove both."""
