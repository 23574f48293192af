"""The checkpoints of a run: writing, verifying, pruning and restoring them, in a folder or at an object-store URL."""
