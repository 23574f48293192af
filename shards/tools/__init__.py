"""What `python -m shards` does.

Inside: verify, stats, card, where.
In: a root.
Out: findings, tables, cards, for people.
"""
