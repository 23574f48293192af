"""Image features: extractors with local weights, run once on each sample set and reference, with results in parts."""
