"""What clients will ask, and how many nodes that needs."""
