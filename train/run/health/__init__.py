"""Monitoring of a run: heartbeats of its ranks, metrics for Prometheus, output of each rank, and throughput."""
