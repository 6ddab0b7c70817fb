"""What the router counts: its Prometheus page, and the load report for the autoscaler."""
