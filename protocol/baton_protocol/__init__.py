"""Everything that crosses a process boundary, and the names both sides must compute alike.

In: nothing of ours, no I/O. Out: records (frozen msgspec structs), block hashes, `KVLayout`,
fingerprints and the error vocabulary. Every other room imports this one.

    ids          the NewTypes
    errors       BatonError tree and OpenAI's error shape
    hashing      names of blocks and chunks
    layout       what one block of KV bytes looks like
    fingerprint  what makes KV interchangeable
    sampling     SamplingParams, the wire form of what a client may ask
    request      Request and Choice: what the router owns
    link         frames between router and node
    store        records kept in Redis: marker, inbox entry, node report, fetch report
    model_source hf:// and pvc://: where a model comes from
    logs         the shape of a log line
    wire         MessagePack with a protocol version
"""

# 2: DrainNode, ResumeNode; a hello says its node's version. 3: Resync. 4: Request.time_left
# 5: SamplingParams.structured, which older nodes would ignore: no such request is for them
PROTOCOL_VERSION = 5
STRUCTURED_SINCE = 5
