"""Whether a run is well, for people and for Prometheus.

Inside: what each rank is at, the metrics endpoint, each rank's output, what steps take.
In: what the loop does, one thing after the other.
Out: who is missing where a collective fails; metrics; `logs/0004/rank-00003.log`.
"""
