"""Connections to one Redis server: addresses, RESP, redis-py, the server's settings."""
