"""Communication between a node's server process and its engine process."""
