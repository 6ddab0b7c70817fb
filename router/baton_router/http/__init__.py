"""HTTP: routes, server-sent events, and the documents about them."""
