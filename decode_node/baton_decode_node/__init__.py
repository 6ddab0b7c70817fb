"""The decode role: what a decode node takes, fetching and write-behind (vLLM's kv_consumer).

    serve          one decode node until SIGTERM or SIGINT
    admission      DecodeRole: which jobs it takes
    fetcher        parked requests that close their gap from the store before they run
    fetch_state    what one of them does when: a pure state machine; fetch or compute?
    write_behind   what whole requests fill, put into the store for others

`serve` is the server process's, the others are the engine process's: neither imports the other.
Every node's engine process runs them, whatever the role (a prefill node fetches the prefix that the
store holds): they implement baton_node's Fetching and WritingBehind, and `baton_cli.engine_process`
gives them to the step loop.
"""
