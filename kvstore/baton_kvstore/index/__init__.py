"""The index role: markers, inboxes, registries, rate limits."""
