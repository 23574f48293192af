"""Evaluation: sample a model, compute metrics with confidence intervals, report, and run blind studies with raters."""
