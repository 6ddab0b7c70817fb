"""Reconciles pools: the process, its loop, and what it applies."""
