"""How a large value goes to a server: one at a time, and with little of it on the way.

A server reads 16 KiB at a time. What waits for it, in the kernel's buffers and in its own
half-read values, leaves the processor's cache if it is much, and then each read takes twice as
long. So the transfer threads of one server take turns to send large values, and a send buffer
holds less than the kernel would allow.

`python -m benchmarks.kv.put_get`: puts of 4 MiB go from 0.4 to 0.8 times the rate of LMCache's
client to 1.05 to 1.2 times (2 AMD cores, BBR as the congestion control; of several runs).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

LARGE_BYTES = 256 << 10  # smaller values gain less than a turn costs
# A turn is awaited no longer than the value takes at this rate. If a send takes longer, a network
# or a busy server limits it, not the cache, and a second connection may be served meanwhile.
AWAITED_BYTES_PER_S = 1 << 30
# The buffer bounds what is sent in one round trip, so it must hold what a fast link carries in one.
# The kernel doubles it, for its own records. A farther server gets the kernel's, which grows.
LINK_BYTES_PER_S = 3e9
LEAST_BUFFER_BYTES = 256 << 10
MOST_BUFFER_BYTES = 1 << 20
TCP_INFO_RTT = struct.Struct("@68xI")  # tcpi_rtt in <linux/tcp.h>, in microseconds


class SendTurns:
    """The turns of all connections to one server. Thread-safe."""

    def __init__(self) -> None:
        self._sending = threading.Lock()

    @contextlib.contextmanager
    def turn(self, size: int, left_s: float) -> Iterator[None]:
        """Wait for the turn to send a value of `size` bytes, at most `left_s` seconds. A
        thread that has waited long enough sends without one."""
        patience = min(size / AWAITED_BYTES_PER_S, left_s) if size >= LARGE_BYTES else 0.0
        taken = patience > 0.0 and self._sending.acquire(timeout=patience)
        try:
            yield
        finally:
            if taken:
                self._sending.release()


def bound_send_buffer(link: socket.socket) -> None:
    """Give a TCP connection that was just opened a small send buffer if its server is near."""
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_RTT.size)
    if len(info) < TCP_INFO_RTT.size:
        return
    size = send_buffer_bytes(TCP_INFO_RTT.unpack(info)[0] / 1e6)
    if size is not None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)


def send_buffer_bytes(round_trip_s: float) -> int | None:
    """Return the size for a connection with this round trip (0.0: not known); None leaves the
    kernel's."""
    size = max(LEAST_BUFFER_BYTES, int(LINK_BYTES_PER_S * round_trip_s))
    return size if round_trip_s and size <= MOST_BUFFER_BYTES else None
