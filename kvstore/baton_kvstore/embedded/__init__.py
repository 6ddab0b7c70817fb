"""Redis servers that Baton starts itself, for one machine."""
