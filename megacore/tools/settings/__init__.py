"""How people write a run's settings: a JSON file, `section.key=value`, a ds_config.

In: what they wrote. Out: a checked `Config` that knows where each value came from, or one line that says what
is wrong.
"""
