"""HTTP: routes, handlers, server-sent events, and the documents about them."""
