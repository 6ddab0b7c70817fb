"""A node's speeds and capacity, learnt from the nodes' reports."""
