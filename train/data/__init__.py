"""Data loading: streams, sample order, filters, files and their cache, random numbers, and the loader."""
