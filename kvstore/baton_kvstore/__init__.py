"""The KV store over Redis. Only this package imports redis and hiredis.

data        DataPlane: puts and gets of chunks on the data servers, in transfer threads
index       commit markers, hand-off inboxes, registries, rate limits (asyncio)
embedded    EmbeddedStore: redis-servers that Baton starts on one machine
connection  endpoints, RESP, redis-py, settings of the servers
settings    StoreSettings, check_reachable
keys        the format of keys, and the lifetime of chunks
errors      the error tree
"""
