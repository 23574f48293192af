"""The lease of a run: one launch at a time may change it, in a run folder or at an object-store URL."""
