"""The decode role: which jobs a decode node accepts, fetching, write-behind (vLLM's kv_consumer).

    serve          runs one decode node until SIGTERM or SIGINT
    admission      DecodeRole: which jobs the node accepts
    fetcher        parked requests: fetches their chunks from the store before they run
    fetch_state    decides what to fetch, and when: a pure state machine per parked request
    fetch_decision whether to fetch or to compute what a lookup found: a pure function
    fetch_chooser  applies it with the node's measured speeds, and keeps them fresh
    early_announcements
                   keeps announcements that arrive before their request
    write_behind   puts the chunks of whole requests into the store for later requests

`serve` and `admission` run in the server process, the others in the engine process: they do not
import each other. Every node's engine process runs them, whatever its role (a prefill node fetches
the prefix that the store holds): `baton_cli.engine_process` passes them to the step loop.
"""
