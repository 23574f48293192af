"""Statistics for a study: preferences with intervals, strengths of several models, and power."""
