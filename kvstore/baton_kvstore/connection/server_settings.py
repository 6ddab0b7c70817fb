"""What the store needs of its servers' settings, and what a server says about its memory.

    tend()         data: no persistence, eviction, a bound on what a client's replies take
                   index: no persistence, no eviction
    read_usage()   bytes used, bytes allowed, keys evicted

In: an open connection; and a mode, `apply` or `check`. Out: settings changed where the server lets
us, and one log line that names them; one warning per server that names, as the lines to type, what
could not be set and what is the user's to choose. To be called once per start of a server (its run
id): nothing here remembers.

`wanted_settings` decides and `care` says what to ask a server, both without I/O: threads that block
speak to the data role, asyncio to the index.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Literal

from baton_kvstore.connection.resp import Reply, RespConnection
from baton_kvstore.errors import ServerRefused

logger = logging.getLogger(__name__)
StoreRole = Literal["data", "index"]
CareMode = Literal["apply", "check"]
Command = tuple[bytes, ...]
Conversation = Generator[Command, Reply | ServerRefused, None]

# What one client does not read. A reply is one value, charged up to a quarter more than its bytes.
REPLIES_BYTES = 16 << 20
REPLIES_VALUES = 3
REPLIES_LEAST_VALUES = 2
# What all clients' buffers take together (Redis 7), beside that: a second net, where it cannot
# catch the healthy. Over this limit a server cuts off whoever has most, and that is a node that
# puts: it counts for 2.5 values, since the server keeps room for the next as big and charges each a
# quarter more. A tenth of 1 GiB was 10 nodes with values of 4 MiB: of 144 puts it cut off 54. So 64
# connections must fit in half of the memory (1.25 GiB for values of 4 MiB); where they do not, no
# limit is better than one that does harm, and each client has its own.
CLIENTS_PERCENT = 50
CLIENTS_VALUES = 64 * 5 // 2
# Each asked alone: Redis 6.2 takes one name at a time.
_NAMES = (
    "save",
    "appendonly",
    "maxmemory",
    "maxmemory-policy",
    "maxmemory-clients",
    "client-output-buffer-limit",
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one server, in bytes. `limit_bytes` 0 is no bound; `evicted_keys` since its start."""

    used_bytes: int
    limit_bytes: int
    evicted_keys: int


@dataclass(frozen=True, slots=True)
class WantedSetting:
    """A setting that should be `value`. `now` is None where the server does not show it. What is
    not `ours` to set depends on what else the user's machine is for."""

    name: str
    value: str
    now: str | None
    why: str
    ours: bool = True

    @property
    def line(self) -> str:
        """What to type."""
        plain = self.value and " " not in self.value
        return f"CONFIG SET {self.name} " + (self.value if plain else f'"{self.value}"')

    @property
    def was(self) -> str:
        return "not shown" if self.now is None else repr(self.now)


def read_usage(connection: RespConnection, deadline: float) -> Usage:
    """Two small commands. Raise StoreUnavailable."""
    memory = _fields(connection.command(deadline, b"INFO", b"memory"))
    stats = _fields(connection.command(deadline, b"INFO", b"stats"))
    return Usage(
        used_bytes=_number(memory.get("used_memory")),
        limit_bytes=_number(memory.get("maxmemory")),
        evicted_keys=_number(stats.get("evicted_keys")),
    )


def tend(
    connection: RespConnection,
    deadline: float,
    role: StoreRole,
    mode: CareMode,
    value_bytes: int = 0,
) -> None:
    """See to the settings of the server that an open connection leads to. `value_bytes`: of one
    stored value. What is refused is a warning; raise StoreUnavailable where the link breaks."""
    talk = care(role, mode, connection.label, value_bytes)
    answer: Reply | ServerRefused = None
    try:
        command = next(talk)
        while True:
            try:
                answer = connection.command(deadline, *command)
            except ServerRefused as error:
                answer = error
            command = talk.send(answer)
    except StopIteration:
        return


def care(role: StoreRole, mode: CareMode, label: str, value_bytes: int = 0) -> Conversation:
    """Yield commands, be sent their replies (or refusals), log what came of it."""
    changed: list[WantedSetting] = []
    left: list[WantedSetting] = []
    refusal = ""
    settings = yield from _read_settings()
    for wanted in wanted_settings(role, settings, value_bytes):
        if mode == "check" or not wanted.ours:
            left.append(wanted)
            continue
        answer = yield (b"CONFIG", b"SET", wanted.name.encode(), wanted.value.encode())
        if isinstance(answer, ServerRefused):
            refusal = f" ({answer})"
            left.append(wanted)
        else:
            changed.append(wanted)
    if changed:
        names = ", ".join(
            f"{wanted.name} {wanted.value!r} (was {wanted.was})" for wanted in changed
        )
        logger.info("%s server %s: set %s", role, label, names)
    if left:
        lines = "; ".join(f"{wanted.line} (now {wanted.was}: {wanted.why})" for wanted in left)
        logger.warning("%s server %s needs other settings%s: %s", role, label, refusal, lines)


# --- the decision -------------------------------------------------------------------------------


def wanted_settings(
    role: StoreRole, settings: Mapping[str, str | None], value_bytes: int = 0
) -> tuple[WantedSetting, ...]:
    """What should be set otherwise. A name that is not in `settings` is unknown to the server, and
    not wished for; None is a setting that it does not show."""
    found = [
        _exactly("save", "", settings, "a cache needs no snapshots, and they stall it"),
        _exactly("appendonly", "no", settings, "a cache needs no log of its writes"),
    ]
    if role == "index":
        why = "an evicted marker is a lost chunk"
        found.append(_exactly("maxmemory-policy", "noeviction", settings, why))
    else:
        found += [_eviction(settings), _bound(settings)]
        # Replies that wait for their client count as memory used: one client that does not read
        # makes a server evict everybody's chunks for them.
        found += [_of_each_client(settings, value_bytes), _of_all_clients(settings, value_bytes)]
    return tuple(wanted for wanted in found if wanted is not None)


def _exactly(
    name: str, value: str, settings: Mapping[str, str | None], why: str
) -> WantedSetting | None:
    now = settings.get(name, value)
    return WantedSetting(name, value, now, why) if now != value else None


def _eviction(settings: Mapping[str, str | None]) -> WantedSetting | None:
    """Any policy that evicts will do: all keys have a TTL."""
    name = "maxmemory-policy"
    if settings.get(name, "unknown") not in (None, "noeviction"):
        return None
    return WantedSetting(
        name, "volatile-ttl", settings[name], "once full it would take no more chunks"
    )


def _bound(settings: Mapping[str, str | None]) -> WantedSetting | None:
    if settings.get("maxmemory") != "0":
        return None
    why = "it may grow until the machine has no memory left"
    return WantedSetting("maxmemory", "BYTES", "0", why, ours=False)


def clients_limit(memory: int, value_bytes: int) -> str:
    """What `maxmemory-clients` may be on a server with this `maxmemory`; "0" is no limit."""
    fits = memory * CLIENTS_PERCENT // 100 >= CLIENTS_VALUES * value_bytes
    return f"{CLIENTS_PERCENT}%" if fits else "0"


def _of_all_clients(settings: Mapping[str, str | None], value_bytes: int) -> WantedSetting | None:
    """A limit that is too low is raised. None is set where somebody has none."""
    name = "maxmemory-clients"
    now, memory = settings.get(name), _number(settings.get("maxmemory"))
    share = now[:-1] if now and now.endswith("%") else ""
    bound = memory * _number(share) // 100 if share else _number(now)
    if bound == 0 or bound >= CLIENTS_VALUES * value_bytes:
        return None
    return WantedSetting(
        name, clients_limit(memory, value_bytes), now, "who brings a value is cut off"
    )


def _of_each_client(settings: Mapping[str, str | None], value_bytes: int) -> WantedSetting | None:
    """The setting is class, hard limit, soft limit and its seconds, for each class of clients."""
    name = "client-output-buffer-limit"
    if name not in settings:
        return None
    why = "replies that a client does not read would push out chunks"
    words = (settings[name] or "").split()
    place = words.index("normal") if "normal" in words else len(words)
    limits = [limit for word in words[place + 1 : place + 3] if (limit := _number(word))]
    shown = " ".join(words[place : place + 4]) if words else None
    if limits:
        if min(limits) >= REPLIES_LEAST_VALUES * value_bytes:
            return None
        why = "two values do not fit"
    value = f"normal {max(REPLIES_BYTES, REPLIES_VALUES * value_bytes)} 0 0"
    return WantedSetting(name, value, shown, why)


# --- what a server says -------------------------------------------------------------------------


def _read_settings() -> Generator[Command, Reply | ServerRefused, dict[str, str | None]]:
    """By CONFIG, or else the few that INFO tells everybody."""
    settings: dict[str, str | None] = {}
    for name in _NAMES:
        answer = yield (b"CONFIG", b"GET", name.encode())
        if not isinstance(answer, list):
            return (yield from _read_info())
        if len(answer) == 2:
            settings[name] = (answer[1] or b"").decode(errors="replace")
    return settings


def _read_info() -> Generator[Command, Reply | ServerRefused, dict[str, str | None]]:
    settings: dict[str, str | None] = dict.fromkeys(_NAMES)
    memory = _fields((yield (b"INFO", b"memory")))
    settings["maxmemory"] = memory.get("maxmemory")
    settings["maxmemory-policy"] = memory.get("maxmemory_policy")
    logged = _fields((yield (b"INFO", b"persistence"))).get("aof_enabled")
    settings["appendonly"] = {"0": "no", "1": "yes"}.get(logged or "")
    return settings


def _fields(reply: Reply | ServerRefused) -> dict[str, str]:
    """INFO's lines."""
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
