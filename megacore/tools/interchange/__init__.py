"""Imports and exports models of other projects: their tensors, settings and tokenizers."""
