"""The settings that the store needs on its Redis servers.

    data     no persistence, eviction, a limit on the memory for clients' replies
    index    no persistence, no eviction

In mode `apply` the settings are changed and one log line names the changes. Settings that the
server refuses to change, that only the user can choose, or that differ in mode `check` go into one
warning, as the commands to type. Call it once per start of a server (run id): this module keeps no
state.

`tend` and `read_wanted` talk to a server. `wanted_settings` and `care` do no I/O, so that blocking
threads (data) and asyncio (index) share them.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from baton_kvstore.connection.info import info_number, parse_info
from baton_kvstore.connection.resp import Reply
from baton_kvstore.connection.resp_connection import RespConnection
from baton_kvstore.errors import ServerRefused
from baton_protocol.policies import StoreCare

logger = logging.getLogger(__name__)
T = TypeVar("T")
StoreRole = Literal["data", "index"]
Command = tuple[bytes, ...]
Conversation = Generator[Command, Reply | ServerRefused, T]
INDEX_MEMORY = 128 << 20  # 510,000 chunks at about 260 bytes per marker
# Limit for the replies that one client has not read yet. A reply is one value; the server charges
# up to a quarter more than its bytes.
REPLIES_BYTES = 16 << 20
REPLIES_VALUES = 3
REPLIES_LEAST_VALUES = 2
# Limit for the buffers of all clients together (Redis 7), in addition to the limit per client. Over
# it a server disconnects the client that uses most, which is a node that puts: such a node counts
# as 2.5 values, since the server reserves room for a second value and charges each a quarter more.
# With a limit of a tenth of 1 GiB, 10 nodes with values of 4 MiB lost 54 of 144 puts. So buffers of
# 64 connections must fit in half of the memory (they need 1.25 GiB for values of 4 MiB). If they do
# not, no limit is better than a harmful one; the limit per client still holds.
CLIENTS_PERCENT = 50
CLIENTS_VALUES = 64 * 5 // 2
# Read one by one: Redis 6.2 takes one name per CONFIG GET.
NAMES = (
    "save",
    "appendonly",
    "maxmemory",
    "maxmemory-policy",
    "maxmemory-clients",
    "client-output-buffer-limit",
)


@dataclass(frozen=True, slots=True)
class WantedSetting:
    """A setting that should be `value`.

    `now` is the current value, None if the server does not show it. With `ours` False only the user
    can choose the value, since it depends on what else the machine runs.
    """

    name: str
    value: str
    now: str | None
    why: str
    ours: bool = True

    @property
    def line(self) -> str:
        """The command that sets it."""
        plain = self.value and " " not in self.value
        return f"CONFIG SET {self.name} " + (self.value if plain else f'"{self.value}"')

    @property
    def was(self) -> str:
        return "not shown" if self.now is None else repr(self.now)


def tend(
    connection: RespConnection,
    deadline: float,
    role: StoreRole,
    mode: StoreCare,
    value_bytes: int = 0,
) -> None:
    """Apply or check the settings of the server at the other end of an open connection.

    `value_bytes` is the size of one stored value. A refused setting only causes a warning. Raise
    StoreUnavailable if the connection fails.
    """
    _converse(connection, deadline, care(role, mode, connection.label, value_bytes))


def read_wanted(
    connection: RespConnection, deadline: float, role: StoreRole, value_bytes: int = 0
) -> tuple[WantedSetting, ...]:
    """The settings that the server at the other end of an open connection should have otherwise.
    Changes nothing. Raise StoreUnavailable if the connection fails."""
    settings = _converse(connection, deadline, _read_settings())
    return wanted_settings(role, settings, value_bytes)


def _converse(connection: RespConnection, deadline: float, conversation: Conversation[T]) -> T:
    answer: Reply | ServerRefused = None
    try:
        command = next(conversation)
        while True:
            try:
                answer = connection.command(deadline, *command)
            except ServerRefused as error:
                answer = error
            command = conversation.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def care(role: StoreRole, mode: StoreCare, label: str, value_bytes: int = 0) -> Conversation[None]:
    """Apply or check the settings, without I/O: yield commands and receive their replies (or
    refusals) by send(). At the end, log what was changed and what should be."""
    changed: list[WantedSetting] = []
    unchanged: list[WantedSetting] = []
    refusal = ""
    settings = yield from _read_settings()
    for wanted in wanted_settings(role, settings, value_bytes):
        if mode == "check" or not wanted.ours:
            unchanged.append(wanted)
            continue
        answer = yield (b"CONFIG", b"SET", wanted.name.encode(), wanted.value.encode())
        if isinstance(answer, ServerRefused):
            refusal = f" ({answer})"
            unchanged.append(wanted)
        else:
            changed.append(wanted)
    if changed:
        names = ", ".join(
            f"{wanted.name} {wanted.value!r} (was {wanted.was})" for wanted in changed
        )
        logger.info("%s server %s: set %s", role, label, names)
    if unchanged:
        lines = "; ".join(f"{wanted.line} (now {wanted.was}: {wanted.why})" for wanted in unchanged)
        logger.warning("%s server %s needs other settings%s: %s", role, label, refusal, lines)


# --- the decision -------------------------------------------------------------------------------
def wanted_settings(
    role: StoreRole, settings: Mapping[str, str | None], value_bytes: int = 0
) -> tuple[WantedSetting, ...]:
    """Return the settings that should have another value.

    `settings` maps names to current values. A missing name is unknown to the server and is not
    wanted; None is a setting that the server does not show.
    """
    settings_to_change = [
        _exactly("save", "", settings, "a cache needs no snapshots, and they stall it"),
        _exactly("appendonly", "no", settings, "a cache needs no log of its writes"),
    ]
    if role == "index":
        why = "an evicted marker is a lost chunk"
        settings_to_change.append(_exactly("maxmemory-policy", "noeviction", settings, why))
    else:
        settings_to_change += [_eviction(settings), _bound(settings)]
        # Unread replies count as used memory: a single client that does not read makes the server
        # evict chunks for them.
        settings_to_change += [
            _of_each_client(settings, value_bytes),
            _of_all_clients(settings, value_bytes),
        ]
    return tuple(wanted for wanted in settings_to_change if wanted is not None)


def _exactly(
    name: str, value: str, settings: Mapping[str, str | None], why: str
) -> WantedSetting | None:
    now = settings.get(name, value)
    return WantedSetting(name, value, now, why) if now != value else None


def _eviction(settings: Mapping[str, str | None]) -> WantedSetting | None:
    """Accept every policy that evicts, since all keys have a TTL."""
    name = "maxmemory-policy"
    if settings.get(name, "unknown") not in (None, "noeviction"):
        return None
    return WantedSetting(
        name, "volatile-ttl", settings[name], "a full server would accept no more chunks"
    )


def _bound(settings: Mapping[str, str | None]) -> WantedSetting | None:
    if settings.get("maxmemory") != "0":
        return None
    why = "it may grow until the machine has no memory left"
    return WantedSetting("maxmemory", "BYTES", "0", why, ours=False)


def clients_limit(memory: int, value_bytes: int) -> str:
    """Return `maxmemory-clients` for a server with this `maxmemory`; "0" means no limit."""
    fits = memory * CLIENTS_PERCENT // 100 >= CLIENTS_VALUES * value_bytes
    return f"{CLIENTS_PERCENT}%" if fits else "0"


def _of_all_clients(settings: Mapping[str, str | None], value_bytes: int) -> WantedSetting | None:
    """Raise a limit that is too low. Set none if the server has none."""
    name = "maxmemory-clients"
    now, memory = settings.get(name), info_number(settings.get("maxmemory"))
    share = now[:-1] if now and now.endswith("%") else ""
    bound = memory * info_number(share) // 100 if share else info_number(now)
    if bound == 0 or bound >= CLIENTS_VALUES * value_bytes:
        return None
    return WantedSetting(
        name, clients_limit(memory, value_bytes), now, "it disconnects nodes that put chunks"
    )


def _of_each_client(settings: Mapping[str, str | None], value_bytes: int) -> WantedSetting | None:
    """The setting lists, for each class of clients: class, hard limit, soft limit, seconds."""
    name = "client-output-buffer-limit"
    if name not in settings:
        return None
    why = "chunks would be evicted for replies that a client does not read"
    parts = (settings[name] or "").split()
    start = parts.index("normal") if "normal" in parts else len(parts)
    limits = [limit for part in parts[start + 1 : start + 3] if (limit := info_number(part))]
    shown = " ".join(parts[start : start + 4]) if parts else None
    if limits:
        if min(limits) >= REPLIES_LEAST_VALUES * value_bytes:
            return None
        why = "it is less than two values"
    value = f"normal {max(REPLIES_BYTES, REPLIES_VALUES * value_bytes)} 0 0"
    return WantedSetting(name, value, shown, why)


# --- what a server says -------------------------------------------------------------------------
def _read_settings() -> Conversation[dict[str, str | None]]:
    """Read the settings with CONFIG GET or, if that is refused, the few that INFO shows."""
    settings: dict[str, str | None] = {}
    for name in NAMES:
        answer = yield (b"CONFIG", b"GET", name.encode())
        if not isinstance(answer, list):
            return (yield from _read_info())
        if len(answer) == 2:
            settings[name] = (answer[1] or b"").decode(errors="replace")
    return settings


def _read_info() -> Conversation[dict[str, str | None]]:
    settings: dict[str, str | None] = dict.fromkeys(NAMES)
    memory = parse_info((yield (b"INFO", b"memory")))
    settings["maxmemory"] = memory.get("maxmemory")
    settings["maxmemory-policy"] = memory.get("maxmemory_policy")
    logged = parse_info((yield (b"INFO", b"persistence"))).get("aof_enabled")
    settings["appendonly"] = {"0": "no", "1": "yes"}.get(logged or "")
    return settings
