"""What one node is told at its start: by the cli's flags, or by a test.

In: nothing. Out: `NodeSettings`, which travels as JSON to the engine process, so it holds plain
values only. Unknown keys are errors.

    SetupError       a start that cannot go on; its message is one line for the user, exit code 1
    `-- EngineLost   the engine process ended while the node served; the node ends with it
"""

from __future__ import annotations

from typing import Literal

import msgspec

from baton_protocol.store import Role

FetchPolicy = Literal["auto", "always", "never"]

EngineKind = Literal["torch", "sim"]
DType = Literal["auto", "float32", "bfloat16"]
Kernels = Literal["auto", "torch", "triton"]
Overlap = Literal["auto", "on", "off"]
StoreCare = Literal["apply", "check"]


class SetupError(Exception):
    """The node cannot start; the message names the offending value and what to do."""


class EngineLost(SetupError):
    """The engine process is gone; the message says how it ended."""


class SimOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Geometry and timing of the simulated engine. A folder given as `model` is not read for them.

    A step sleeps prefill_base_ms (if it holds prompt tokens) + prompt tokens x
    prefill_ms_per_token + decode_ms + decoding rows x decode_ms_per_seq.
    """

    prefill_base_ms: float = 0.0
    prefill_ms_per_token: float = 0.0
    decode_ms: float = 0.0
    decode_ms_per_seq: float = 0.0
    layers: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 0  # 0: as many as the built-in byte tokenizer has
    eos_every: int = 0  # every so many positions the token is EOS; 0 never
    # For tests of failover: the engine process ends at once when a prompt holds this id.
    poison_token: int | None = None


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node: who it is, where it listens, which engine it runs, which store it uses.

    `port` 0 takes a free one (the registry and /health say which). `address` is what others dial,
    by default http://host:port. An empty `index_url` means no store: every request is computed
    here. With a `link_token` only who says it gets a link or an artifact. `kv_memory` is in bytes
    and loses to `kv_blocks`; `host_kv_memory`, in bytes too, keeps what the cache evicts.
    `store_settings` says whether the store's servers are set as they should be, or only looked at;
    `write_behind_bandwidth` is in bytes per second, None a tenth of the measured link, 0 off.
    Durations are in seconds.
    """

    node: str
    role: Role
    host: str = "127.0.0.1"
    port: int = 0
    address: str = ""
    pool: str = "default"
    revision: str = ""

    index_url: str = ""
    data_urls: tuple[str, ...] = ()
    store_settings: StoreCare = "apply"
    fetch: FetchPolicy = (
        "auto"  # what the store holds, where computing it is predicted to be faster
    )
    write_behind_bandwidth: int | None = None
    link_token: str = ""

    engine: EngineKind = "torch"
    model: str = ""
    served_name: str = ""  # default: the folder's last component, or "sim"
    dtype: DType = "auto"
    device: str = "cpu"
    gpu_memory_utilization: float = 0.9
    kv_memory: int | None = None
    kv_blocks: int | None = None
    host_kv_memory: int = 0
    block_size: int = 16
    chunk_blocks: int | None = None
    kv_shards: int = 1  # values per chunk, by KV heads
    max_batched_tokens: int | None = None
    max_num_seqs: int = 256
    max_model_len: int | None = None
    threads: int | None = None
    kernels: Kernels = "auto"
    enforce_eager: bool = False  # no CUDA graphs
    overlap: Overlap = "auto"  # a step begun before the one before it is read: on cuda
    overcommit: bool = False  # believe given sizes that this machine's memory cannot hold
    verify_weights: bool = False  # hash them again, whatever the digest cache says
    chat_template: str | None = None  # a file, or the template itself
    sim: SimOptions = SimOptions()

    lookup_wait_s: float = 0.1  # how long a request waits for the index before it computes
    first_wait_s: float = 2.0  # how long chunks may still come once the first token is known
    blocks_wait_s: float = 30.0  # how long a fetch waits for free blocks before computing instead
    drain_s: float = 10.0  # how long running requests may go on after SIGTERM
    link_grace_s: float = 5.0  # a router away for so long has its requests aborted
    start_wait_s: float = 600.0  # building the engine: loading weights, compiling
    load_every_s: float = 0.2
    events_every_s: float = 0.1
    log_level: str = "WARNING"  # of the engine process; the server's is the caller's business
    json_logs: bool = False  # likewise

    def __repr__(self) -> str:
        """Without URLs and token: what is secret must not reach a log."""
        return f"NodeSettings(node={self.node!r}, role={self.role!r})"

    def name(self) -> str:
        """The model's name for clients."""
        if self.served_name:
            return self.served_name
        last = self.model.rstrip("/").rsplit("/", 1)[-1]
        return last or self.engine

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> NodeSettings:
        return msgspec.json.decode(data, type=cls)
