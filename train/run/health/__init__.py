"""Monitoring of a run: heartbeats of its ranks, metrics for Prometheus, each rank's output, and throughput."""
