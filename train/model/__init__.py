"""The network to train: how it is built, called, optimized, averaged and sharded, and how tensors are stored."""
