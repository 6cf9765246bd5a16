"""Shows a run's figures to others: TensorBoard, Weights & Biases, Prometheus. Each is a `train.monitor.Monitor`."""
