"""How fast this machine moves chunks to and from the data servers, and when that pays.

Moving KV beats computing it if the link is faster than bytes per token x prompt tokens per second
of a node. The link is measured here; the bytes follow from the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton_cli.doctor.finding import Finding
from baton_cli.doctor.host import Host
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.data.link_probe import NoRoom, measure_link
from baton_kvstore.errors import StoreError
from baton_protocol.layout import CHUNK_MOST_BYTES, VALUE_HEADER_BYTES, KVLayout

CHECK = "bandwidth"
ALL_S = 6.0  # for all servers, one after the other: side by side they would share the link
# A decode node of a small model on a CPU computes more prompt tokens per second than this.
SLOW_TOKENS_PER_S = 100.0


def value_bytes(layout: KVLayout | None) -> int:
    """Bytes of one stored value: header, and a chunk or a shard of it."""
    return VALUE_HEADER_BYTES + (layout.shard_bytes if layout is not None else CHUNK_MOST_BYTES)


def check_bandwidth(
    data_urls: Sequence[str], layout: KVLayout | None, host: Host
) -> Iterator[Finding]:
    """A server that cannot be reached is reported by `redis_servers`."""
    server_s = ALL_S * host.patience / len(data_urls)
    for url in data_urls:
        label = parse_endpoint(url).label
        try:
            speed = measure_link(url, value_bytes(layout), server_s)
        except NoRoom as error:
            yield Finding(check=CHECK, severity="note", found=f"not measured: {error}")
            continue
        except StoreError:
            continue
        moved = f"{label}: put {_gb(speed.put_bytes_per_s)}, get {_gb(speed.get_bytes_per_s)}"
        if layout is None:
            yield Finding(check=CHECK, severity="ok", found=moved)
        else:
            yield break_even(moved, speed.get_bytes_per_s, layout)


def break_even(
    moved: str, get_bytes_per_s: float, layout: KVLayout, computed_per_s: float | None = None
) -> Finding:
    """`computed_per_s` are the prompt tokens per second of a node, None if unknown."""
    tokens = get_bytes_per_s * layout.chunk_tokens / layout.chunk_bytes
    slow = tokens < (SLOW_TOKENS_PER_S if computed_per_s is None else computed_per_s)
    known = "" if computed_per_s is None else f", and the node computes {computed_per_s:.0f}"
    return Finding(
        check=CHECK,
        severity="note" if slow else "ok",
        found=f"{moved}: KV of {tokens:.0f} tokens per second{known}",
        why="fetching pays for nodes that compute fewer prompt tokens per second",
        remedy="use a faster link, --store-codec int8, or --handoff auto" if slow else "",
    )


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
