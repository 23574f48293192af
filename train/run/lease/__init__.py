"""The lease of a run, which lets only one launch at a time change the run, in a folder or at an object-store URL."""
