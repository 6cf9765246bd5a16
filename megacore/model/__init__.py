"""GPT blocks, written parallel once: a single device is the layout 1 × 1 × 1, not another model."""
