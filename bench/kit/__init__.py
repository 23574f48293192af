"""Helpers shared by benchmarks and tests: timing, tables, synthetic roots and receipts."""
