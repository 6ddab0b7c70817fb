"""The node's server process: links to routers, requests, health, metrics. No torch."""
