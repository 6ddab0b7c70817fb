"""Limits: bounds, ratio, budget and rates."""
