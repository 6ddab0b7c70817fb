"""What both roles of a node share.

In: jobs from routers over the link, chunks from the store. Out: tokens, chunks, load reports.

A node is two processes. The server (aiohttp, no torch):

    settings        NodeSettings: what a node is told at its start
    server          routes, start and end: run_node(settings, role)
    service         links, table and engine process put together
    draining        whether it takes work, and when what runs is to go elsewhere
    links, table    routers' WebSockets; whose requests are here
    live, history   one request: its deltas, and those that its router may have missed
    textual         ids to text, stop strings, logprobs
    identity        artifacts, address, report; role, heartbeat, metrics beside it
    engine_process  starts the other one; frames and port are what they speak

The engine process, one thread that decides and others that carry bytes:

    engine_main     its main; build makes the engine and measures it; parent ends it with its server
    desk            the step loop
    parking, lot    how a waiting request closes its gap from the store: pure; and done
    economy, weigher    fetch what the store has, or compute it: pure; and applied
    publishing, publisher   which chunks of a prefill job are put and announced: pure; and done
    behind, puts    what is written behind; the blocks held until a put has copied them
    batch           the requests the engine runs
    connector       KVConnector over baton_kvstore (nostore without one); indexing is its other
                    half, in the thread of control
    reporter        load, speeds and cache events
"""
