"""The router as a process: composition, life cycle, reloaded files."""
