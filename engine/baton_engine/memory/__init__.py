"""How many bytes an engine takes, and whether they fit. No torch."""
