"""Files of tenants, and batches of requests that run when the pool has room."""
