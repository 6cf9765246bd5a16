"""Writing text with a trained model, in any tensor × pipeline layout."""
