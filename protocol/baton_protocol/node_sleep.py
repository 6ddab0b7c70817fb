"""The node's HTTP routes for sleep, which routers call, too: paths, modes, and the answer."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

SLEEP_SINCE = 7  # the protocol version
SLEEP_PATH, WAKE_PATH = "/sleep", "/wake_up"
# What becomes of requests that run on the node. move: they may end there until the drain deadline,
# and then move to other nodes. wait: they end there. abort: their routers get them back at once.
NodeSleepMode = Literal["move", "wait", "abort"]
NODE_SLEEP_MODES: tuple[NodeSleepMode, ...] = get_args(NodeSleepMode)


class SleepState(msgspec.Struct, frozen=True):
    """The answer of both routes. `away`: the parts of its engine that the node has given back."""

    is_sleeping: bool
    away: tuple[str, ...]
