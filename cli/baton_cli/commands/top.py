"""`baton top`: the nodes, requests and tenants of a running pool, live.

In: TopOptions; snapshots of the router's GET /pool/events. Out: a screen on a terminal; elsewhere a
table, or a line of JSON, per second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import closing
from itertools import islice

import msgspec

from baton_cli.commands.router_options import TopOptions
from baton_cli.errors import CommandError
from baton_cli.terminal.pool_feed import PATH, PoolFeed, snapshots
from baton_cli.terminal.pool_lines import ORDERS, pool_lines
from baton_cli.terminal.remote_router import RemoteRouter
from baton_router.live.records import Snapshot


def run(options: TopOptions) -> int:
    show(RemoteRouter(options.url, options.api_key), once=options.once, as_json=options.json)
    return 0


def show(router: RemoteRouter, *, once: bool, as_json: bool) -> None:
    if once or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        with closing(router.stream(PATH)) as stream:
            # Rates are those since the snapshot before: the first one has none.
            seen = snapshots(stream)
            printed = _print(islice(seen, 1, 2) if once else seen, as_json)
        if not (once and printed):
            raise CommandError(f"{router.url} ended the stream; it may restart: try again")
        return
    # Not every Python has curses.
    from baton_cli.terminal.pool_screen import show_pool

    with PoolFeed(router) as feed:
        show_pool(feed)


def _print(seen: Iterable[Snapshot], as_json: bool) -> int:
    """Print each snapshot as it comes; return their number."""
    printed = 0
    for snapshot in seen:
        if as_json:
            text = json.dumps(msgspec.to_builtins(snapshot))
        else:
            lines = pool_lines(snapshot, ORDERS["a"])
            text = "\n".join([*(line.text for line in lines), ""])
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        printed += 1
    return printed
