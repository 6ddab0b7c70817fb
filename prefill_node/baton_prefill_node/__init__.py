"""The prefill role: which jobs a prefill node accepts, and publishing (vLLM's kv_producer).

    serve          runs one prefill node until SIGTERM or SIGINT
    admission      PrefillRole: which jobs the node accepts
    publisher      puts a prefill job's chunks into the store and announces them to the decode node
    publish_state  decides which chunks, and when: a pure state machine per job

`serve` and `admission` run in the server process, the others in the engine process: they do not
import each other. Every node's engine process runs `publisher`, whatever its role:
`baton_cli.engine_process` passes it to the step loop.
"""
