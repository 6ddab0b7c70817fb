"""`baton bench`: load on an engine or on a server, and its figures."""
