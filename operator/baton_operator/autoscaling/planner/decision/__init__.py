"""The planner's rules in their order, and the decision with its reason."""
