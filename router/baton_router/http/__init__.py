"""HTTP: routes, server-sent events, and the API document."""
