"""The engine process: its step loop, the requests in it, and the KV that they fetch and publish."""
