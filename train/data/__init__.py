"""Data loading: streams, sample order, filters, files and their cache, keyed random draws, and the loader."""
