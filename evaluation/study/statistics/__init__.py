"""Statistics for a study: preferences with intervals, strengths of three or more models, and power analysis."""
