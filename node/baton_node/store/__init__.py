"""The KV connector: the engine process's interface to the KV store, and its implementations."""
