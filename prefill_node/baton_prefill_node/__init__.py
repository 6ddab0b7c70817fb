"""The prefill role: what a prefill node takes, and publishing (vLLM's kv_producer).

    serve          one prefill node until SIGTERM or SIGINT
    admission      PrefillRole: which jobs it takes
    publisher      a prefill job's chunks on their way into the store, announced to the decode
                   node; and a pure state machine per job: which chunks, and when

`serve` is the server process's, `publisher` the engine process's: neither imports the other. Every
node's engine process runs `publisher`, whatever the role: it implements baton_node's Publishing,
and `baton_cli.engine_process` gives it to the step loop.
"""
