"""A stream whose client gives up if it receives nothing for long."""

from __future__ import annotations

from typing import Protocol


class KeepAlive(Protocol):
    """What waiting calls need of the HTTP layer, which is above this one."""

    keepalive_s: float

    async def keep_alive(self) -> None:
        """Send a keep-alive, after `keepalive_s` seconds of silence. Raise ConnectionError if the
        client is gone."""
