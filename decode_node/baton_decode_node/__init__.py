"""The decode role: which jobs a decode node accepts, fetching, write-behind (vLLM's kv_consumer).

    serve          runs one decode node until SIGTERM or SIGINT
    admission      DecodeRole: which jobs the node accepts
    fetcher        parked requests: fetches their chunks from the store before they run
    fetch_state    a pure state machine per parked request, and the choice to fetch or to compute
    write_behind   puts the chunks of whole requests into the store for later requests

`serve` and `admission` run in the server process, the others in the engine process: they do not
import each other. Every node's engine process runs them, whatever its role (a prefill node fetches
the prefix that the store holds). They implement baton_node's Fetching and WritingBehind, and
`baton_cli.engine_process` passes them to the step loop.
"""
