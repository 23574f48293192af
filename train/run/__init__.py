"""Everything in a run besides its training steps: checkpoints, the run's lease, health, logs and loss alarms."""
