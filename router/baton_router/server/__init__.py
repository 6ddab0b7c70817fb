"""The router as a process: composition, workers on one port, reloaded files."""
