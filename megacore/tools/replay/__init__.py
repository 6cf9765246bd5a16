"""Runs a past step of a run again, and says which tensor and which sample are out of line in it."""
