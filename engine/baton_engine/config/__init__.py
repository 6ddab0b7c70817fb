"""Settings of an engine and of its model, as read from flags and config.json. No torch."""
