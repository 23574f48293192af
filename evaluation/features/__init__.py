"""Image features, computed once for each sample set or reference by extractors with local weights, and then stored."""
