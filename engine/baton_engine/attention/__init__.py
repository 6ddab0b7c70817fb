"""Paged attention: the backends and their kernels."""
