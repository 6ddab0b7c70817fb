"""What became of a request: log line, explanation, trace."""
