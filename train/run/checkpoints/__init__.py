"""A run's checkpoints: how they are written, which of them stay, how they are read, and those at an address.

Inside: a checkpoint's files, the writer, shares of several processes, rules of keeping, a run folder at an address.
In: weights, optimizer and state as they stand after a step.
Out: `checkpoints/step-00001000/`, in a folder or at an address.
"""
