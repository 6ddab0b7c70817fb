"""The messages that cross a process boundary, and the names that both sides must compute alike.

It imports no other Baton package and does no I/O. It provides records (frozen msgspec structs),
block hashes, `KVLayout`, fingerprints and the error classes. Every other package imports it.

    ids          identifier types (NewType)
    errors       the BatonError tree, and how an error travels between processes
    hashing      names of blocks and chunks
    layout       the byte layout of one block of KV, and the size of a chunk
    fingerprint  the digest that decides whether two nodes can exchange KV
    sampling     SamplingParams: the sampling options of a request
    request      Request and log-probabilities
    link         frames between router and node
    store        records kept in Redis: markers, inbox entries, and reports of nodes and routers
    model_source the addresses of models: hf:// and pvc://
    options      declares an option once: default, help, bounds and flag
    policies     the policies that flags, records and the InferencePool name alike
    figures      bounded number and text types for the fields of records
    hosts        the Host headers that a server accepts
    logs         the format of log lines
    traces       W3C trace context and spans
    node_sleep   the node's HTTP routes for sleep
    event_loop   the event loop of processes that serve connections
    garbage      garbage collections of such processes
    parent_death how a child process ends with its parent
    backoff      pauses before the restarts of a process
    wire         MessagePack with a protocol version
"""

# Changes by version:
# 2: DrainNode and ResumeNode; NodeReport.protocol, so a hello tells the node's version.
# 3: Resync.
# 4: Request.time_left.
# 5: SamplingParams.structured. An older node ignores it, so never send it such a request.
# 6: ResetPrefixCache. Request.priority and SamplingParams.skip_reading_prefix_cache, which an older
#    node ignores: its answers are the same.
#    SamplingParams.use_beam_search and extra_args, which only nodes of this version get.
# 7: PinPrefix, UnpinPrefix, Load.pins; Load.wakes, and the routes /sleep and /wake_up of nodes.
# 8: SamplingParams.logprob_token_ids, which only nodes of this version get. Request.pooling,
#    Delta.vector and NodeReport.pooling: an older node ignores `pooling`, and reports none.
#    PoolingParams.second_text: an older node ignores it, and has no model that reads it.
PROTOCOL_VERSION = 8
STRUCTURED_SINCE = 5
BEAMS_SINCE = EXTRA_ARGS_SINCE = 6
LOGPROB_IDS_SINCE = 8
