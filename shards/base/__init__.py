"""Shared foundation: errors, config loading, devices, durable files, local and object stores, progress output.

This package imports no other package of the project.
"""
