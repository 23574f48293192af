"""What a stage 1 worker adds to its encoders, and how it does beside a plain script.

Inside: encoders that stand in for a GPU's, the plain script, and both beside each other.
In: pictures of the project's own making, random or the demo's weights.
Out: two sections of docs/evidence/benchmarks.md. `python -m bench.worker`
"""
