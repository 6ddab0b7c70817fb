"""The index role: markers, inboxes, the registry, rate limits."""
