"""Admission: limits per tenant, fair queueing, capacity, cold start."""
