"""Inputs of stage 1 (folders, parquet files, tars, MDS): detecting their kind, reading samples, detecting damage."""
