"""Statistics of a study: preferences with intervals, strengths of several models, and power."""
