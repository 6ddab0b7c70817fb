"""The command line of `kubectl baton`, which kubectl finds as `kubectl-baton` on the PATH.

In: argv; the variable BATON_API_KEY. Out: text on stdout, and an exit code as of `baton`: 0
success, 1 failure (one line on stderr gives the reason), 2 a wrong flag.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import quote

from baton_cli.commands.top import show
from baton_cli.errors import CommandError
from baton_cli.kubectl.cluster import Cluster
from baton_cli.kubectl.pool_routers import KEY_VARIABLE, PoolRouters
from baton_cli.kubectl.why_text import why_lines
from baton_cli.terminal.explain_text import explanation_lines
from baton_operator.kube.kinds import POOL

ABOUT = "Look at Baton's pools, and take nodes out, through your login to the cluster."
EXAMPLES = """\
examples:
  kubectl baton why demo                        what keeps the pool from being ready, and what to do
  kubectl baton top demo -n models              its nodes, requests and tenants, live
  kubectl baton explain demo 8c1f0c2e4b7d4f0e9a61c3d2b5e7f809 --context staging
  kubectl baton drain demo demo-decode-5c9f7-x2x4j --deadline 60
  kubectl baton resume demo demo-decode-5c9f7-x2x4j

It reaches a pool's routers through `kubectl port-forward`, with the pool's link token from Secret
POOL-auth, or with the key in BATON_API_KEY, which `explain` needs in a pool with API keys. So its
user needs: get on inferencepools; for all but `why` also list on pods, create on pods/portforward,
and get on that Secret unless BATON_API_KEY is set.
"""


class Command(NamedTuple):
    """`arguments` are those after the pool's name."""

    run: Callable[[argparse.Namespace, Cluster, PoolRouters], None]
    help: str
    arguments: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


def why(given: argparse.Namespace, cluster: Cluster, routers: PoolRouters) -> None:
    pool = cluster.read(f"{POOL.plural}.{POOL.group}", given.pool)
    print("\n".join(why_lines(pool)))


def top(given: argparse.Namespace, cluster: Cluster, routers: PoolRouters) -> None:
    with routers.one() as router:
        show(router, once=given.once, as_json=given.json)


def explain(given: argparse.Namespace, cluster: Cluster, routers: PoolRouters) -> None:
    call = routers.ask_each(f"/requests/{quote(given.request, safe='')}")
    print(json.dumps(call, indent=2) if given.json else "\n".join(explanation_lines(call)))


def drain(given: argparse.Namespace, cluster: Cluster, routers: PoolRouters) -> None:
    body: dict[str, object] = {"reason": "kubectl baton drain"}
    if given.deadline is not None:
        body["deadline_s"] = given.deadline
    routers.ask_each(f"/nodes/{quote(given.node, safe='')}/drain", body)
    print(
        f"{given.node} drains: it takes no new requests, and hands over those that still run at the"
        f" deadline. `kubectl baton resume {given.pool} {given.node}` undoes it"
    )


def resume(given: argparse.Namespace, cluster: Cluster, routers: PoolRouters) -> None:
    routers.ask_each(f"/nodes/{quote(given.node, safe='')}/resume", {})
    print(f"{given.node} takes requests again")


COMMANDS = {
    "why": Command(why, "say what keeps a pool from being ready, and what the planner decided"),
    "top": Command(
        top, "show nodes, requests and tenants live, as `baton top`", flags=("once", "json")
    ),
    "explain": Command(
        explain, "show how a request was served, as `baton explain`", ("request",), ("json",)
    ),
    "drain": Command(
        drain, "take a node out of use without losing a request", ("node",), ("deadline",)
    ),
    "resume": Command(resume, "use a drained node again", ("node",)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = build_parser().parse_args(argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)  # which leaves no port forward behind
    cluster = Cluster(given.namespace, given.context)
    routers = PoolRouters(cluster, given.pool, os.environ.get(KEY_VARIABLE, ""))
    try:
        COMMANDS[given.command].run(given, cluster, routers)
    except CommandError as error:
        print(f"kubectl baton: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader closed our stdout (`kubectl baton why | head`). Silence the flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kubectl baton",
        description=ABOUT,
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tree = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        one = tree.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        one.add_argument("pool", metavar="POOL", help="name of the InferencePool")
        for argument in command.arguments:
            one.add_argument(argument, metavar=argument.upper())
        for flag in command.flags:
            _add_flag(one, flag)
        one.add_argument("-n", "--namespace", default="", help="namespace of the pool")
        one.add_argument("--context", default="", help="context of the kubeconfig")
    return parser


def _add_flag(parser: argparse.ArgumentParser, flag: str) -> None:
    if flag == "deadline":
        parser.add_argument(
            "--deadline",
            type=float,
            metavar="SECONDS",
            help="how long requests may still run there (default: the node's --drain-timeout)",
        )
    else:
        about = {"once": "show it once and exit", "json": "print JSON"}
        parser.add_argument(f"--{flag}", action="store_true", help=about[flag])
