"""One request's life: tokenized, placed, carried from attempt to attempt, ended."""
