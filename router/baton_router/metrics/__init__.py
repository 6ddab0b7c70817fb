"""The router's figures: its Prometheus page, and the load report for the autoscaler."""
