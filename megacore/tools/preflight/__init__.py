"""Looks at machines before a run starts on them: each by itself first, then the links between them."""
