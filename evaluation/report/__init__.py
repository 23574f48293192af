"""The HTML report of training runs: losses, speed, cost, data, metrics with intervals, and sample images."""
