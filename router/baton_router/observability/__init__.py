"""What became of each request: log line, explanation, trace."""
