"""What a training takes, before a GPU is rented.

Inside: the plan's config, facts on machines and prices, measured rates, the arithmetic, the report.
In: a YAML file, and benchmarks where there are some.
Out: days, cost and storage: text, a PNG, JSON. `python -m plan --config configs/plan.yaml`
"""
