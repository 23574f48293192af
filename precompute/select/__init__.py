"""Select the rows of LAION-style metadata that are worth downloading.

Contents: the three-pass job, the filter rules, the opt-out list, the metadata reader and the funnel report.
Input: parquet files with URLs, captions and scores.
Output: parquet files with the selected rows, and a funnel that counts the rows dropped by each rule.
"""
