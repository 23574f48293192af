"""Run keyed units of work on Ray workers, with retries, exclusion of bad nodes, and pauses during outages."""
