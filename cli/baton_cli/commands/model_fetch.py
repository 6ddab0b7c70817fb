"""`baton model fetch`: downloads a model from a hub once, for all processes that share a folder.

In: FetchOptions; HF_ENDPOINT and HF_TOKEN. Out: the model's folder on stdout, progress in the log
and, if an index is given, FetchReports there. The fetch continues while the index is down.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from baton_cli.commands.fetch_options import FetchOptions
from baton_cli.errors import CommandError, UsageError
from baton_cli.local_pool.store import logged_in
from baton_cli.logs import configure
from baton_cli.models.download_state import DownloadFolder
from baton_cli.models.hub_client import DEFAULT_ENDPOINT
from baton_cli.models.model_fetch import ModelFetch
from baton_protocol.ids import NodeId
from baton_protocol.model_source import HubModel, SourceError, parse_source

if TYPE_CHECKING:
    pass

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def run(options: FetchOptions) -> int:
    configure(options.log_level, options.json_logs)
    fetch = make_fetch(options, os.environ)
    try:
        asyncio.run(fetch.run())
    except OSError as error:
        hint = "; free disk space there: fetched files are kept" if error.errno in NO_ROOM else ""
        place = error.filename or fetch.folder.path
        raise CommandError(f"{place}: {error.strerror or error}{hint}") from error
    print(fetch.folder.path)
    return 0


def make_fetch(options: FetchOptions, environ: Mapping[str, str]) -> ModelFetch:
    """Build the fetch; raise UsageError for a wrong source, folder or endpoint."""
    try:
        model = parse_source(options.source)
    except SourceError as error:
        raise UsageError(str(error)) from error
    if not isinstance(model, HubModel):
        raise UsageError(f"{model} is not a hub model: write hf://ORG/NAME[@REVISION]")
    if not options.to:
        raise UsageError("--to is missing: give the folder that gets the model's folder")
    endpoint = environ.get("HF_ENDPOINT", "").rstrip("/") or DEFAULT_ENDPOINT
    if not endpoint.startswith(("http://", "https://")):
        raise UsageError(f"HF_ENDPOINT {endpoint!r} is not a URL: write {DEFAULT_ENDPOINT}")
    return ModelFetch(
        model=model,
        folder=DownloadFolder(
            Path(options.to).expanduser().absolute() / model.folder_name, secrets.token_hex(4)
        ),
        weights=options.weights,
        room=options.room,
        endpoint=endpoint,
        token=environ.get("HF_TOKEN", "").strip(),
        index_url=logged_in(options, options.redis_index)[0],
        pool=options.pool,
        node=NodeId(options.node or socket.gethostname()),
    )
