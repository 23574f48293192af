"""The life of a run around its training steps: checkpoints, the run folder's lease, health, logs and loss alarms."""
