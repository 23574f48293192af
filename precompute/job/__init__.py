"""Stage 1 as a job: many tars on a fleet of workers, the ledger of results, and the job's metrics."""
