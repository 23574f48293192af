"""The planner: how long a training takes, what it costs and what it stores, worked out before a GPU is rented.

`facts` holds what is known or assumed about machines and prices, `config` the plan's YAML, `work` counts FLOPs,
`measured` reads benchmarks; `scaling`, `costs` and `restarts` are the arithmetic; `rows` and `report` put them
together; `text` and `figure` show the result.
"""
