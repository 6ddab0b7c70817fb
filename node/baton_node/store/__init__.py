"""The KV connector: what the engine process asks of the KV store, and who answers."""
