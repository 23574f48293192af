"""Tests of train/run/lease."""
