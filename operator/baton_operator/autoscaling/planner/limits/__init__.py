"""What bounds, ratio, budget and time allow of it."""
