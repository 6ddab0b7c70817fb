"""`baton bench`: puts load on an engine or a server, and reports figures."""
