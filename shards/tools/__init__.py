"""The maintenance commands behind `python -m shards`, and `latentmill init`."""
