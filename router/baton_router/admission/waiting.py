"""What admission sees of a call that waits.

In: nothing. Out: Protocols, of which the HTTP layer brings the real ones.
"""

from __future__ import annotations

from typing import Protocol


class Waiting(Protocol):
    """`waits` is set to why the call waits, "" for one that does not."""

    waits: str

    @property
    def tenant_name(self) -> str:
        """Whose call it is; "" where the router has no API keys."""


class KeepAlive(Protocol):
    """A stream whose client is to hear something every `keepalive_s`, or it gives up."""

    keepalive_s: float

    async def keep_alive(self) -> None:
        """Say that the stream lives; raise ConnectionError where the client is gone."""
