"""What a router tells monitors of itself: its version, and how many requests it answers now."""

from __future__ import annotations

from importlib.metadata import version

from baton_router.openai.answers import Closed

VERSION = version("baton-serve")


class Version(Closed):
    version: str


class ServerLoad(Closed):
    """`server_load` counts generation requests that are held, queued, running or being written."""

    server_load: int
