"""Redis servers of our own, for one machine."""
