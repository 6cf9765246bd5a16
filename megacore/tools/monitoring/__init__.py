"""Callbacks that show a run's metrics: TensorBoard, Weights & Biases, Prometheus and a live line."""
