"""Placement: predicts the cost of nodes and pairs, and chooses one. Pure."""
