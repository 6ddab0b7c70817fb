"""The node's server process: links to routers, requests, drain, health, metrics. No torch."""
