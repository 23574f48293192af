"""What `python -m shards` and `latentmill init` do.

Inside: verify, stats, card, where; init.
In: a root.
Out: findings, tables, cards, configs, for people.
"""
