"""How good a model is, and how sure that is.

Inside: sampling, reference sets, features, metrics with their intervals, following a run, the report.
In: a run folder, an export or a hub pipeline; prompts; a reference of pictures; extractors by path.
Out: pictures with receipts, metrics.json, evaluations.jsonl, report.html. `python -m evaluation watch runs/phase2`
"""
