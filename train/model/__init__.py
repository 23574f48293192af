"""The network to train: building and calling it, its optimizer, averages, sharding and tensor files."""
