"""Tiny checkpoints with quantized weights, written layout by layout."""
