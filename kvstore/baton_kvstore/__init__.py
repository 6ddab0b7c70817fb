"""KV exchange over Redis; the only package that imports redis.

data        DataPlane: chunks in and out of the data servers, in transfer threads
index       commit markers, hand-off inboxes, the registry of nodes, rate limits (asyncio)
embedded    EmbeddedStore: our own redis-servers on one machine
connection  endpoints, RESP, redis-py
settings    StoreSettings, check_reachable
keys        how keys are spelled, and how long they live
errors      the error tree
"""
