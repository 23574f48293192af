"""Derive one latents root from another: change storage, drop text towers, or add text towers.

The images are not decoded again. The result is the root that stage 1 would have written from the same tars.
"""
