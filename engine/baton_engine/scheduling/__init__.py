"""Which sequences compute how many tokens in a step. No torch."""
