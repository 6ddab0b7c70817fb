"""Whether the port that a router shall listen on is free, or which process has it."""

from __future__ import annotations

from collections.abc import Iterator

from baton_cli.commands.up import reserve_port
from baton_cli.doctor.finding import Finding
from baton_cli.doctor.host import Host
from baton_cli.doctor.web_client import is_router
from baton_cli.errors import CommandError

CHECK = "port"
HOST = "127.0.0.1"


def check_port(port: int, host: Host, *, given: bool) -> Iterator[Finding]:
    """`given`: the user named the port. Otherwise a router that has it is what the user looks at,
    as in a router's pod."""
    try:
        reserve_port(HOST, port).close()
    except CommandError as error:
        url = f"http://{HOST}:{port}"
        if not given and is_router(url, host):
            yield Finding(
                check=CHECK,
                severity="note",
                found=f"a router of Baton listens on port {port} already",
                why="another one needs another --port",
                remedy="check that one:",
                commands=(f"baton doctor --router {url}",),
            )
            return
        found, _, remedy = str(error).rpartition("; ")
        yield Finding(
            check=CHECK,
            severity="error",
            found=found,
            why="a router that shall listen there does not start",
            remedy=remedy,
        )
        return
    yield Finding(check=CHECK, severity="ok", found=f"port {port} is free")
