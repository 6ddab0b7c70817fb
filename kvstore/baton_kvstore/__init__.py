"""KV exchange over Redis; the only package that imports redis.

    settings    StoreSettings, check_reachable
    data        DataPlane: chunks in and out of the data instances, in transfer threads
    index       Index: commit markers and hand-off inboxes (asyncio)
    registry    Registry: node reports with a TTL, for discovery (asyncio)
    embedded    EmbeddedStore: our own redis-servers on one machine; guardian, binary
    errors      the error tree

below the data plane: instance (queue, threads) > operations (one put or get) > chunk (header and
checksum), resp (the wire), circuit (is it worth asking), staging (bytes in flight), rate

below index and registry: client (redis-py, tamed). For all: keys (spelling, lifetimes), endpoint.
"""
