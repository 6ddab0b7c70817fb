"""Where a request runs: predicted cost of nodes and pairs, and the choice. Pure."""
