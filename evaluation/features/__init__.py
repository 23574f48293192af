"""Image features: extractors with local weights, applied once to sample sets and references and stored in parts."""
