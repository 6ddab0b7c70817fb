"""Which requests may start now: limits per tenant, fair queueing, cold start."""
