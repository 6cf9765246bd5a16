"""Shows a run's figures to others: TensorBoard, Weights & Biases, Prometheus, and a live line.

Each is a `train.logs.Monitor`.
"""
