"""The rules in their order, and the decision with its reason."""
