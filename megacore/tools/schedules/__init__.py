"""What can be known of a schedule without running it: that it is complete and cannot hang,
and how long each action waits.

In: a lowered `Plan`, or a file that has one. Out: a refusal, or a timeline. The core runs the same plan.
"""
