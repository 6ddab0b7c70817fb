"""Paged attention: backends and their kernels."""
