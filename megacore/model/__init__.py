"""GPT models, written once in parallel layers: one device is the layout 1 × 1 × 1, and not another model."""
