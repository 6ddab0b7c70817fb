"""Expected demand, and the number of nodes that it needs."""
