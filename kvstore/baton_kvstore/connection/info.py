"""The reply to INFO: lines of `name:value`, as each reader of a server's state needs them."""

from __future__ import annotations

from baton_kvstore.connection.resp import Reply
from baton_kvstore.errors import ServerRefused


def parse_info(reply: Reply | ServerRefused) -> dict[str, str]:
    """Parse the lines of an INFO reply."""
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def info_number(text: str | None) -> int:
    """Return the number that a field or a setting holds, 0 if it holds none."""
    return int(text) if text and text.isdigit() else 0
