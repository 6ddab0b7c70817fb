"""The part of a node that prefill and decode nodes share.

In: jobs from routers over the link, chunks from the store. Out: tokens, chunks, load reports.

A node is two processes: the server process (aiohttp, no torch) and the engine process, where one
thread runs the step loop and other threads transfer KV.

    server     the server process: routes, links to routers, requests, drain, health, metrics
    engine     the engine process: builds and measures the engine, runs the step loop, reports load;
               defines the Protocols that the two roles' classes implement
    store      the KV connector over baton_kvstore, and one for a node without a store
    ipc        frames between the two processes; makes them end together
    artifacts  the model's tokenizer, config and template files
    settings   a node's settings
    errors     why a node cannot start or go on
"""
