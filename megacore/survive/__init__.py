"""Runs that go on: the supervisor that restarts them, and drills that show it."""
