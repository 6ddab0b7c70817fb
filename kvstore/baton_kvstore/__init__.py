"""KV exchange over Redis; the only package that imports redis.

    settings    StoreSettings, check_reachable
    data        DataPlane: chunks in and out of the data instances, in transfer threads
    index       Index: commit markers and hand-off inboxes (asyncio)
    registry    Registry: node reports with a TTL, for discovery (asyncio)
    embedded    EmbeddedStore: our own redis-servers on one machine; guardian, binary
    errors      the error tree

below the data plane: instance (threads) > lanes (what waits), operations (one put or get) > chunk
(header and checksum), resp (the wire); chores (connections, probes, a look now and then) > health
and circuit (is it worth asking), care (settings); staging (bytes in flight), rate, behind (what may
be written behind)

below index and registry: client (redis-py, tamed), async_resp (lookups). For all: keys (spelling,
lifetimes), endpoint.
"""
