"""What both roles of a node share.

In: jobs from routers over the link, chunks from the store. Out: tokens, chunks, load reports.

A node is two processes: the server (aiohttp, no torch), and the engine process, in which one thread
decides and others carry bytes.

    server    the server process: routes, links to routers, requests, drain, health, metrics
    engine    the engine process: builds and measures the engine, the step loop, load reports; what
              it asks of the roles' fetching and publishing
    store     the KV connector over baton_kvstore, or over nothing
    ipc       how the two processes talk, and end together
    settings  what a node is told at its start
"""
