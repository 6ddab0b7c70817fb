"""Converts the flags of one role to its settings.

In: NodeOptions or RouterOptions. Out: NodeSettings or RouterSettings, with the model's folder, a
name for the node, and a login in the URLs of the store. Raises CommandError for a wrong value.
"""

from __future__ import annotations

import re
import secrets
import socket
from pathlib import Path

from baton_cli.errors import CommandError
from baton_cli.local_pool.store import logged_in
from baton_cli.models.local_folder import find_model
from baton_cli.options.records import NodeOptions, RouterOptions
from baton_node.settings import ExchangeSettings, ModelSettings, NodeSettings, ServerSettings
from baton_protocol.figures import NAME
from baton_protocol.options import values_of
from baton_protocol.store import Role
from baton_router.settings import RouterSettings


def node_settings(options: NodeOptions, role: Role) -> NodeSettings:
    """Convert flags to NodeSettings; raise CommandError for a wrong flag or a missing model."""
    check_parsers(options)
    index_url, *data_urls = logged_in(options, options.index_url, *options.data_urls)
    folder, name = "", str(options.engine)
    if options.model or options.engine == "torch":
        model = find_model(options.model, weights=options.engine == "torch")
        folder, name = str(model.path), model.name
    if len(options.served_model_name) > 1:
        raise CommandError(
            f"--served-model-name {' '.join(options.served_model_name)}: a node reports one name;"
            " give several to the router"
        )
    derived = {
        "node": check_name(options.node) or new_name(role),
        "index_url": index_url,
        "data_urls": tuple(data_urls),
        "link_token": check_token(options.link_token),
        "model": folder,
        "served_model_name": options.served_model_name or (name,),
        "chat_template": check_template(options.chat_template),
    }
    given = values_of(options, ServerSettings, ModelSettings, ExchangeSettings)
    return NodeSettings(
        **(given | derived),
        role=role,
        log_level=options.log_level.upper(),
        json_logs=options.json_logs,
    )


def new_name(role: Role) -> str:
    """A unique node name. The digits are random, because containers often share process ids and
    host names."""
    return f"{socket.gethostname()}-{role}-{secrets.token_hex(4)}"


def router_settings(options: RouterOptions) -> RouterSettings:
    """Convert flags to RouterSettings; raise CommandError for a wrong token or login."""
    derived = {
        "index_url": logged_in(options, options.index_url)[0],
        "link_token": check_token(options.link_token),
    }
    return RouterSettings(**(values_of(options, RouterSettings) | derived))


def check_name(name: str) -> str:
    """Return --node unchanged, even ""; raise CommandError if routers would refuse the name."""
    if name and re.match(NAME, name) is None:
        raise CommandError(
            f"--node {name!r}: use at most 253 letters, digits and punctuation marks, "
            "without spaces"
        )
    return name


def check_token(token: str) -> str:
    """Return --link-token unchanged; raise CommandError if an HTTP header cannot carry it."""
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise CommandError(
            "--link-token contains a space or another character that no HTTP header can carry;"
            " use letters and digits"
        )
    return token


def check_template(path: str) -> str:
    """Return --chat-template as an absolute path, "" if empty; raise CommandError if there is no
    such file."""
    if not path:
        return ""
    file = Path(path).expanduser()
    if not file.is_file():
        raise CommandError(f"--chat-template {path}: the file does not exist")
    return str(file.resolve())


def check_parsers(options: ModelSettings) -> None:
    """Raise CommandError for an unknown --tool-parser or --reasoning-parser."""
    from baton_text.artifacts import ArtifactError
    from baton_text.parsers.registry import parsers_artifact

    try:
        parsers_artifact(options.tool_parser, options.reasoning_parser)
    except ArtifactError as error:
        raise CommandError(str(error)) from error
