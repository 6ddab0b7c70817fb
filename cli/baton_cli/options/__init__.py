"""Flags, environment variables and their types, declared once for each command."""
