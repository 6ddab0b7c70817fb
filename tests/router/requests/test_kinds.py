"""Kinds of nodes during a roll-out: which get new requests, and which are rolled out for good."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from baton_protocol.ids import Epoch, Fingerprint, NodeId
from baton_protocol.link import Load, RunJob
from baton_protocol.store import NodeLoad, Role, Speeds, differing
from baton_router.auth import Tenant
from baton_router.nodes.node_view import NodeView
from baton_router.nodes.pool_view import PoolView
from baton_router.openai.chat import ChatCall
from baton_router.openai.completions import CompletionCall
from baton_router.requests.prepared import Prepared
from baton_router.requests.tokenize import fits_serving, prepare, prepare_for_kind
from baton_text.artifacts import byte_artifacts
from tests.router import pools
from tests.support.nodes.fake_node import LAYOUT, VOCAB, FakeNode, make_report
from tests.support.nodes.servings import make_serving
from tests.support.waiting import until

OLD, NEW = (Fingerprint(letter * 32) for letter in "12")


class Pool:
    """A PoolView with short node names: `d2-0` is the first decode node of the kind NEW."""

    def __init__(self) -> None:
        self.view = PoolView(lambda: 100.0, max_chunks=10)

    def add_node(self, name: str, **changes: Any) -> NodeView:
        role: Role = "decode" if name[0] == "d" else "prefill"
        report = {"fingerprint": Fingerprint(name[1] * 32)} | changes
        node = self.view.hello(make_report(name, role, **report))
        node.usable = True
        return node

    def whole(self) -> list[str]:
        return sorted(node.report.node for nodes in self.view.whole().values() for node in nodes)

    def drain(self, name: str, replaced_by: str = "") -> None:
        load = Load(Epoch("epoch-1"), "draining", Speeds(), NodeLoad(), replaced_by=replaced_by)
        self.view.load(NodeId(name), load)

    def rolled_out(self, name: str = "d1-0") -> str:
        return self.view.rolled_out(self.kinds[name])

    @property
    def kinds(self) -> dict[str, Any]:
        return {name: node.kind for name, node in self.view.nodes.items()}


@pytest.mark.parametrize(
    ("nodes", "whole"),
    [
        ("", ""),
        ("d1-0", "d1-0"),
        ("p1-0", "p1-0"),
        ("d1-0 d2-0", "d1-0 d2-0"),
        ("p1-0 d1-0 d2-0", "d1-0 p1-0"),
        ("p1-0 d1-0 p2-0", "d1-0 p1-0"),
        ("p1-0 d1-0 d2-0 d2-1 p3-0 p3-1 p3-2", "d1-0 p1-0"),
        ("p1-0 d1-0 d2-0 p2-0", "d1-0 d2-0 p1-0 p2-0"),
        ("d1-0 d2-0 p2-0", "d1-0 d2-0 p2-0"),
        ("p1-0 d2-0", "p1-0"),
        ("p1-0 d2-0 p2-0", "d2-0 p2-0"),
    ],
)
def test_kinds_with_all_roles_of_the_kind_served_longest_get_new_requests(
    nodes: str, whole: str
) -> None:
    pool = Pool()
    for name in nodes.split():
        pool.add_node(name)
        pool.view.kind()
    assert pool.whole() == whole.split()


@pytest.mark.parametrize(
    ("nodes", "going", "spared"),
    [
        ("", "d1-0", True),
        ("d1-0", "d1-0", False),
        ("d1-0 d1-1", "d1-0", True),
        ("d1-0 d1-1", "d1-0 d1-1", False),
        ("d1-0 p1-0", "p1-0", False),
        ("d1-0 p1-0 d2-0", "d1-0", False),
        ("d1-0 p1-0 d2-0 p2-0", "d1-0 p1-0", True),
        ("d1-0 p1-0 d2-0 p2-0", "d1-0 p2-0", False),
        ("d1-0 d2-0 p2-0", "d2-0", True),
        ("p1-0 d2-0", "d2-0", True),
    ],
)
def test_nodes_can_be_spared_if_one_kind_keeps_all_its_roles_without_them(
    nodes: str, going: str, spared: bool
) -> None:
    pool = Pool()
    for name in nodes.split():
        pool.add_node(name)
        pool.view.kind()
    assert pool.view.can_spare([NodeId(name) for name in going.split()]) is spared


def test_the_kind_served_longest_stays_while_one_of_its_nodes_is_ready() -> None:
    pool = Pool()
    assert pool.view.kind() is None
    pool.add_node("d1-0")
    for name in ("p1-0", "d2-0", "d2-1", "p3-0", "p3-1", "p3-2"):
        assert pool.view.kind() == pool.kinds["d1-0"]
        pool.add_node(name)
    pool.drain("p1-0")
    assert pool.view.kind() == pool.kinds["d1-0"]
    pool.drain("d1-0")
    assert pool.view.kind() == pool.kinds["p3-0"]


FILES = {
    "tokenizer.json": "a",
    "tokenizer_config.json": "b",
    "config.json": "c",
    "generation_config.json": "d",
    "special_tokens_map.json": "e",
    "chat_template.jinja": "f",
}
DIFFERENT: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    *(({"artifacts": FILES | {name: "other"}}, [name]) for name in FILES),
    ({"artifacts": {k: v for k, v in FILES.items() if k != "config.json"}}, ["config.json"]),
    (
        {"artifacts": FILES | {"additional_chat_templates/rag.jinja": "g"}},
        ["additional_chat_templates/rag.jinja"],
    ),
    ({"fingerprint": NEW}, ["fingerprint"]),
    ({"fingerprint": NEW, "weights": "--quantization int4"}, ["fingerprint", "weights"]),
    (
        {"fingerprint": NEW, "layout": msgspec.structs.replace(LAYOUT, block_size=8)},
        ["fingerprint", "layout"],
    ),
    (
        {"fingerprint": NEW, "artifacts": FILES | {"tokenizer.json": "o", "config.json": "o"}},
        ["fingerprint", "config.json", "tokenizer.json"],
    ),
    ({"model": "another-name", "revision": "r2", "max_model_len": 99}, []),
]


@pytest.mark.parametrize(("changes", "parts"), DIFFERENT)
def test_nodes_are_of_one_kind_if_nothing_that_changes_a_stream_s_tokens_or_end_differs(
    changes: dict[str, Any], parts: list[str]
) -> None:
    pool = Pool()
    first = pool.add_node("d1-0", artifacts=FILES)
    second = pool.add_node("d1-1", **({"artifacts": FILES} | changes))
    assert (first.kind == second.kind) is (parts == [])
    assert differing(first.report, second.report) == parts


def changed_eos() -> dict[str, bytes]:
    files = byte_artifacts(VOCAB)
    config = json.loads(files["generation_config.json"]) | {"eos_token_id": [257, 10]}
    return files | {"generation_config.json": json.dumps(config).encode()}


@pytest.mark.integration
async def test_a_stream_does_not_continue_on_a_node_with_other_eos_ids(
    decode: FakeNode, other: FakeNode
) -> None:
    other.serve_artifacts(changed_eos())
    async with pools.half_answered(decode) as (client, answer):
        await pools.join(client, other)
        await decode.restart("epoch-2")
        decode.script.run = "answer"
        assert pools.text_of(await answer) == pools.REPLY
        assert other.got_of(RunJob) == []


@pytest.mark.integration
@pytest.mark.parametrize(("revision", "level"), [("", "WARNING"), ("r2", "INFO")])
async def test_a_node_of_another_kind_is_logged_and_shown_with_the_differences(
    decode: FakeNode,
    other: FakeNode,
    caplog: pytest.LogCaptureFixture,
    revision: str,
    level: str,
) -> None:
    caplog.set_level("INFO", "baton_router.nodes.fleet")
    other.serve_artifacts(changed_eos())
    other.report = msgspec.structs.replace(other.report, revision=revision)
    async with pools.running(decode) as client:
        await pools.join(client, other)
        nodes = (await client.get("/pool"))[1]["nodes"]
    assert [node["differs"] for node in nodes] == [[], ["generation_config.json"]]
    [warning] = [record for record in caplog.records if "different kinds" in record.message]
    assert warning.levelname == level
    assert "decode-1" in warning.message
    assert "generation_config.json" in warning.message


@pytest.mark.integration
async def test_a_node_with_other_weights_is_named_in_the_log_and_in_the_error_without_it(
    decode: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = FakeNode("prefill-0", "prefill", weights="bfloat16")
    decode.report = msgspec.structs.replace(decode.report, fingerprint=NEW, weights="gptq")
    async with prefill, pools.running(prefill, missing_role="fail") as client:
        client.dial(decode.address)
        await until(lambda: "different kinds" in caplog.text)
        status, body, _ = await pools.completing(client)
        nodes = (await client.get("/pool"))[1]["nodes"]
    why = "they differ in fingerprint, weights (gptq, bfloat16); no request can use both"
    assert f"decode-0 and prefill-0 are of different kinds: {why}" in caplog.text
    assert status == 503
    assert (
        "of another kind: decode-0, which differ in fingerprint, weights"
        in (body["error"]["message"])
    )
    assert [(each["weights"], each["in_use"]) for each in nodes] == [
        ("gptq", False),
        ("bfloat16", True),
    ]


# --- rolled out for good --------------------------------------------------------------------------


def test_a_kind_is_rolled_out_once_each_of_its_nodes_reports_a_replacement() -> None:
    pool = Pool()
    for name in ("d1-0", "p1-0", "d2-0"):
        pool.add_node(name)
    revisions = [pool.rolled_out()]
    for name in ("d1-0", "p1-0"):
        pool.drain(name, "r2")
        revisions.append(pool.rolled_out())
    assert revisions == ["", "", "r2"]
    pool.view.lost(NodeId("d1-0"))
    pool.view.forget(NodeId("p1-0"))
    assert pool.rolled_out() == "r2"
    assert pool.rolled_out("d2-0") == ""


def test_a_rolled_out_kind_stays_so_when_all_its_nodes_are_forgotten() -> None:
    pool = Pool()
    kind = pool.add_node("d1-0").kind
    pool.add_node("d2-0")
    pool.drain("d1-0", "r2")
    pool.view.forget(NodeId("d1-0"))
    assert pool.view.rolled_out(kind) == "r2"
    pool.add_node("d1-1")
    pool.view.forget(NodeId("d1-1"))
    assert pool.view.rolled_out(kind) == ""


def test_a_kind_is_not_rolled_out_if_its_last_forgotten_node_reported_no_replacement() -> None:
    pool = Pool()
    kind = pool.add_node("d1-0").kind
    for name in ("d1-1", "d2-0"):
        pool.add_node(name)
    pool.drain("d1-0", "r2")
    for name in ("d1-0", "d1-1"):
        pool.view.forget(NodeId(name))
    assert pool.view.rolled_out(kind) == ""


def test_a_rolled_out_kind_stays_so_when_its_last_node_returns_as_another_kind() -> None:
    pool = Pool()
    kind = pool.add_node("d1-0").kind
    pool.drain("d1-0", "r2")
    pool.view.hello(make_report("d1-0", "decode", epoch=Epoch("e2"), fingerprint=NEW)).usable = True
    assert pool.view.rolled_out(kind) == "r2"


@pytest.mark.parametrize("how", ["ready", "starting", "drains by hand", "is lost", "resumed"])
def test_a_kind_is_not_rolled_out_while_one_of_its_nodes_may_come_back(how: str) -> None:
    pool = Pool()
    for name in ("d1-0", "d1-1", "d2-0"):
        pool.add_node(name)
    pool.drain("d1-0", "r2")
    if how == "starting":
        pool.view.nodes[NodeId("d1-1")].usable = False
    elif how == "drains by hand":
        pool.drain("d1-1")
    elif how == "is lost":
        pool.view.lost(NodeId("d1-1"))
    elif how == "resumed":
        pool.drain("d1-1", "r2")
        assert pool.rolled_out() == "r2"
        pool.view.load(NodeId("d1-1"), Load(Epoch("epoch-1"), "ready", Speeds(), NodeLoad()))
    assert pool.rolled_out() == ""


def test_a_kind_is_not_rolled_out_while_no_other_kind_is_ready() -> None:
    """The replacements may be of the same kind and not discovered yet."""
    pool = Pool()
    pool.add_node("d1-0")
    pool.drain("d1-0", "r2")
    assert pool.rolled_out() == ""
    pool.add_node("d2-0").usable = False
    assert pool.rolled_out() == ""
    pool.add_node("d2-0").usable = True
    assert pool.rolled_out() == "r2"


# --- moving to another kind -----------------------------------------------------------------------


async def prepared(call: ChatCall | CompletionCall, max_model_len: int = 100) -> Prepared:
    tenant, rng = Tenant(salt="s"), random.Random(0)
    serving = make_serving(max_model_len, fingerprint=OLD)
    [item] = await prepare(call, serving, "r", tenant=tenant, deadline=60.0, rng=rng)
    return item


def completion(**body: Any) -> CompletionCall:
    return CompletionCall.parse(msgspec.json.encode({"prompt": list(range(40))} | body))


async def test_a_request_moved_to_another_kind_keeps_its_ids_and_gets_new_chunk_hashes() -> None:
    layout = msgspec.structs.replace(LAYOUT, block_size=16, chunk_blocks=1)
    other = make_serving(fingerprint=NEW, layout=layout)
    item = await prepared(completion())
    moved = await prepare_for_kind(item, other)
    assert moved.request == item.request
    assert moved.request.params.seed is not None
    assert (moved.kind, moved.serving) == (other.kind, other)
    assert (len(item.chunks), len(moved.chunks)) == (40 // 8, 40 // 16)
    assert not set(item.chunks) & set(moved.chunks)
    [fresh] = await prepare(
        completion(), other, "r", tenant=Tenant(salt="s"), deadline=60.0, rng=random.Random(0)
    )
    assert moved.chunks == fresh.chunks


@pytest.mark.parametrize(
    ("params", "max_model_len", "report", "fitting"),
    [
        ({}, 56, {}, True),
        ({}, 55, {}, False),
        ({"max_tokens": 60}, 100, {}, True),
        ({"max_tokens": 60}, 99, {}, False),
        ({}, 100, {"artifacts": {"tokenizer.json": "other"}}, False),
        ({}, 100, {"vocab_size": 40}, True),
        ({}, 100, {"vocab_size": 39}, False),
        ({"logit_bias": {"45": 1}}, 100, {"vocab_size": 45}, False),
        ({"stop_token_ids": [45]}, 100, {"vocab_size": 45}, False),
        ({"allowed_token_ids": [45]}, 100, {"vocab_size": 45}, False),
        ({"bad_words": ["z"]}, 100, {"vocab_size": 45}, False),
    ],
)
async def test_only_requests_that_fit_the_other_kind_may_move_to_it(
    params: dict[str, Any], max_model_len: int, report: dict[str, Any], fitting: bool
) -> None:
    item = await prepared(completion(**params))
    assert fits_serving(item, make_serving(max_model_len, fingerprint=NEW, **report)) is fitting


async def test_a_moved_request_without_max_tokens_fills_the_other_kind_s_context() -> None:
    chat = ChatCall.parse(msgspec.json.encode({"messages": [{"role": "user", "content": "Hi"}]}))
    item = await prepared(chat)
    prompt = len(item.request.prompt_ids)
    assert item.request.params.max_tokens == 100 - prompt
    for length, most in ((prompt + 1, 1), (50, 50 - prompt), (200, 100 - prompt)):
        other = make_serving(length, fingerprint=NEW)
        assert fits_serving(item, other)
        assert (await prepare_for_kind(item, other)).request.params.max_tokens == most
    assert not fits_serving(item, make_serving(prompt, fingerprint=NEW))
