"""The router as a process: composition, several workers on one port, reloaded files."""
