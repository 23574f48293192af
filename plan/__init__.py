"""Estimates of the time, cost and storage of a training run: `python -m plan --config configs/plan.yaml`."""
