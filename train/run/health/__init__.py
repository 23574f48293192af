"""Monitoring of a run: heartbeats of the ranks, metrics for Prometheus and copies of the ranks' output."""
