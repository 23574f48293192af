"""Monitoring of a run: heartbeats of the ranks, metrics for Prometheus, copies of the ranks' output, and throughput."""
