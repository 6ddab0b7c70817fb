"""docs/architecture.md names files, folders, flags and keys that exist, and fits in one sitting."""

from __future__ import annotations

import re
from pathlib import Path

from baton_cli.main import COMMANDS
from baton_cli.options.flag import flags_of
from baton_kvstore import keys
from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROOMS = (
    *("protocol", "text", "kvstore", "engine", "node", "prefill_node", "decode_node"),
    *("router", "operator", "cli"),
)
NAME = re.compile(r"`([A-Za-z_][\w.-]*(?:/[\w.-]*)+)`")
FLAG = re.compile(r"`(--[a-z-]+)`")
LINES = 400


def missing(text: str) -> list[str]:
    """The paths in backquotes that do not exist, in the text's order."""
    return [name for name in NAME.findall(text) if not exists(name)]


def exists(name: str) -> bool:
    """Whether a path exists that may leave out the package folder: router/http/ for
    router/baton_router/http/."""
    room, _, rest = name.partition("/")
    inside = room in ROOMS and (ROOT / room / f"baton_{room}" / rest).exists()
    return inside or (ROOT / name).exists()


def test_the_page_fits_in_one_sitting() -> None:
    assert len(PAGE.splitlines()) <= LINES


def test_every_file_and_folder_that_the_page_names_exists() -> None:
    assert len(NAME.findall(PAGE)) > 100
    assert missing(PAGE) == []


def test_a_name_of_a_missing_file_or_folder_is_reported() -> None:
    wrong = ["router/requests/flights.py", "engine/fast/", "tests/nothing/"]
    right = ["router/requests/state.py", "kvstore/data/", "tests/e2e/"]
    assert missing(" ".join(f"`{name}`" for name in wrong + right)) == wrong


def test_every_folder_of_every_package_is_on_the_page() -> None:
    folders = {
        f"{room}/{path.parent.name}/"
        for room in ROOMS
        for path in (ROOT / room / f"baton_{room}").glob("*/__init__.py")
    }
    assert {folder for folder in folders if f"`{folder}`" not in PAGE} == set()


def test_every_flag_that_the_page_names_exists() -> None:
    known = {flag.option for command in COMMANDS for flag in flags_of(command.options)}
    assert set(FLAG.findall(PAGE)) <= known


def test_the_page_lists_exactly_the_keys_of_the_store() -> None:
    pool, node, epoch = "POOL", NodeId("NODE"), Epoch("EPOCH")
    fingerprint, chunk = Fingerprint("FP"), BlockHash(b"\xab")
    made = [
        keys.chunk_key(fingerprint, chunk, 0).replace(b":s0", b":sN"),
        keys.room_key(fingerprint) + b":N",
        keys.marker_key(fingerprint, chunk),
        keys.inbox_key(pool, node, epoch),
        keys.probe_key(pool, node, epoch),
        keys.nodes_key(pool),
        keys.node_key(pool, node),
        keys.fetches_key(pool),
        keys.fetch_key(pool, node),
        keys.routers_key(pool),
        keys.router_key(pool, "ROUTER"),
        keys.pins_key(pool),
        keys.pin_key(pool, "ID"),
        keys.responses_key(pool),
        keys.response_key(pool, "TENANT", "ID"),
        keys.response_sizes_key(pool),
        keys.response_lease_key(pool, "TENANT", "ID"),
        keys.lease_key(pool, "NAME"),
        keys.resume_key(pool, "REQUEST"),
        keys.resume_log_key(pool, "REQUEST"),
        keys.budget_key(pool, "TENANT"),
        keys.decisions_key(pool),
    ]
    written = re.findall(r"`((?:kv|[a-z]{1,2})1:[^`]+)`", PAGE)
    assert written == [key.decode().replace("ab", "HASH") for key in made]
    assert len(made) == sum(name.endswith("_key") for name in vars(keys))
