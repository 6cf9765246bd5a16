"""Models of other projects in and out: what their tensors and settings are called, and how they are laid out."""
