"""Stage 1 as a job: many tars on a fleet of workers.

Inside: the run, the ledger of what came of each tar, how fast it goes, and the figures that Prometheus reads.
In: tars, the recipe, the cluster that was joined.
Out: receipts in a root; a ledger; figures on stderr and at the nodes' metrics endpoints.
"""
