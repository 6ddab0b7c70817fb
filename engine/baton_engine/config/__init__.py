"""Settings of an engine (from flags) and of its model (from config.json). No torch."""
