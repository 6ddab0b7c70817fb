"""The life of one request: tokenization, placement, attempts, end."""
