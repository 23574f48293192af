"""Features of pictures: extractors with local weights, sample sets and references as input, computed once in parts."""
