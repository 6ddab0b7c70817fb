"""The processes that `up` plans: their command lines, variables and parsed settings."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton_cli.commands.role_settings import node_settings, router_settings
from baton_cli.commands.up import settle, show_answer, show_ready
from baton_cli.commands.up_plan import THIS_MACHINE, Machine, make_plan
from baton_cli.errors import CommandError
from baton_cli.local_pool.chat_answer import ChatAnswer
from baton_cli.local_pool.children import ChildSpec
from baton_cli.local_pool.gpus import Gpu, Memory
from baton_cli.local_pool.router_client import RouterAddress, get_page
from baton_cli.local_pool.store import StoreUrls
from baton_cli.local_pool.supervisor import PoolPlan
from baton_cli.main import read_command
from baton_cli.options.devices import CUDA
from baton_cli.options.records import CommonOptions, NodeOptions, RouterOptions, UpOptions
from baton_engine.config.engine_config import SimConfig
from baton_node.artifacts import load_artifacts
from baton_protocol.policies import EngineKind
from baton_text.artifacts import BATON

STORE = StoreUrls("unix:///s/index.sock", ("unix:///s/a.sock", "unix:///s/b.sock"))
SIM = UpOptions(engine="sim", prefill=1, decode=2, port=8123, pool="p", drain_timeout=4)


def plan_of(options: UpOptions, machine: Machine = THIS_MACHINE) -> PoolPlan:
    environment = {"PATH": "/bin", "BATON_PORT": "1", "HF_HOME": "/h"}
    return make_plan(options, STORE, environment, machine=machine)


def child_options(spec: ChildSpec) -> tuple[str, object]:
    """The child's command and its options, as the child itself parses them."""
    command, options = read_command(spec.argv[3:], spec.variables)
    return command.words, options


def test_each_node_gets_its_role_and_a_unique_name() -> None:
    plan = plan_of(SIM)
    assert [(spec.name, spec.role) for spec in plan.nodes] == [
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
        ("decode-1", "decode"),
    ]
    assert [spec.argv[3] for spec in plan.nodes] == ["prefill", "decode", "decode"]


def test_children_inherit_no_baton_variables() -> None:
    assert plan_of(SIM).environment == {"PATH": "/bin", "HF_HOME": "/h"}


def test_store_logins_reach_children_but_no_command_line() -> None:
    urls = StoreUrls("redis://:s3cret@i", ("redis://:s3cret@d",))
    plan = make_plan(SIM, urls, {})
    for spec in (*plan.nodes, plan.router):
        assert "s3cret" not in " ".join(spec.argv) + repr(spec)
        _, child = child_options(spec)
        assert isinstance(child, NodeOptions | RouterOptions)
        assert child.index_url == urls.index


def test_a_node_gets_its_store_pool_engine_and_supervisor() -> None:
    options = replace(SIM, sim=SimConfig(decode_ms=2.5), kv_memory=1 << 30, chunk_blocks=2)
    command, child = child_options(plan_of(options).nodes[1])
    assert command == "decode"
    assert isinstance(child, NodeOptions)
    assert (child.node, child.pool, child.port, child.host) == ("decode-0", "p", 0, "127.0.0.1")
    assert (child.index_url, child.data_urls) == (STORE.index, STORE.data)
    assert (child.engine, child.sim.decode_ms, child.kv_memory) == ("sim", 2.5, 1 << 30)
    assert (child.chunk_blocks, child.drain_timeout_s) == (2, 4)
    assert child.supervisor_pid == os.getpid()


def test_a_node_gets_the_kv_transfer_options() -> None:
    options = replace(
        SIM,
        kv_shards=2,
        fetch="always",
        write_behind_bandwidth=5 * 10**7,
        store_settings="check",
    )
    _, child = child_options(plan_of(options).nodes[0])
    assert isinstance(child, NodeOptions)
    settings = node_settings(child, "prefill")
    assert (settings.kv_shards, settings.fetch) == (2, "always")
    assert (settings.write_behind_bandwidth, settings.store_settings) == (50_000_000, "check")


COMPUTING = ("device", "gpu_memory_utilization", "enforce_eager", "overlap", "verify_weights")


def test_a_node_gets_the_compute_options() -> None:
    options = replace(
        SIM,
        device=CUDA,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        overlap="on",
        verify_weights=True,
    )
    _, child = child_options(plan_of(options).nodes[0])
    assert isinstance(child, NodeOptions)
    settings = node_settings(child, "prefill")
    assert [getattr(settings, name) for name in COMPUTING] == [*("cuda", 0.5, True, "on", True)]


GPUS = [Gpu(name, Memory(80 << 30, 80 << 30)) for name in ("GPU-a", "GPU-b")]
TWO_GPUS = Machine(gpus=lambda environment: GPUS)


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (UpOptions(model="m", device="cuda", kv_blocks=9, prefill=1, decode=1), ""),
        (UpOptions(model="m", device="cuda:1", kv_blocks=9, decode=1), "2 nodes on GPU-b: "),
        (UpOptions(model="m", device="cuda", kv_blocks=9, decode=2), "2 nodes on GPU-a: "),
        (SIM, ""),
    ],
)
def test_the_plan_says_that_nodes_take_turns_on_a_gpu(options: UpOptions, warning: str) -> None:
    assert plan_of(options, TWO_GPUS).warning.partition("without")[0] == warning


def test_a_node_sees_only_its_own_gpu() -> None:
    options = UpOptions(model="m", device="cuda:1", kv_blocks=9, prefill=1, decode=1)
    for spec in plan_of(options, TWO_GPUS).nodes:
        assert spec.variables["CUDA_VISIBLE_DEVICES"] == "GPU-b"
        _, child = child_options(spec)
        assert isinstance(child, NodeOptions)
        assert child.device == CUDA


def test_a_write_behind_bandwidth_of_zero_is_accepted() -> None:
    _, child = read_command(["decode", "--engine", "sim", "--write-behind-bandwidth", "0"], {})
    assert isinstance(child, NodeOptions)
    assert node_settings(child, "decode").write_behind_bandwidth == 0


def test_the_router_gets_its_address_hand_off_and_placement_options() -> None:
    options = replace(SIM, handoff="always", handoff_min_tokens=7, served_model_name=("m", "n"))
    options = replace(options, placement="prefix", allow_policy_header=True)
    command, child = child_options(plan_of(options).router)
    assert command == "router"
    assert isinstance(child, RouterOptions)
    assert (child.host, child.port, child.pool) == ("127.0.0.1", 8123, "p")
    assert (child.handoff, child.handoff_min_tokens) == ("always", 7)
    assert child.served_model_name == ("m", "n")
    assert (child.placement, child.allow_policy_header) == ("prefix", True)
    settings = router_settings(child)
    settings.check()
    assert (settings.index_url, settings.drain_timeout_s) == (STORE.index, 4)


def test_the_router_gets_its_timeouts_and_the_missing_role_policy() -> None:
    options = replace(
        SIM,
        missing_role="queue",
        unready_wait_s=1,
        request_timeout_s=2,
        stall_timeout_s=3,
        link_patience_s=4,
        keepalive_s=5,
    )
    _, child = child_options(plan_of(options).router)
    assert isinstance(child, RouterOptions)
    settings = router_settings(child)
    assert settings.missing_role == "queue"
    assert (settings.unready_wait_s, settings.request_timeout_s) == (1, 2)
    assert (settings.stall_timeout_s, settings.link_patience_s, settings.keepalive_s) == (3, 4, 5)


def test_the_router_gets_the_wake_wait() -> None:
    assert router_settings(RouterOptions(nodes=("http://n",), wake_wait_s=9)).wake_wait_s == 9


def test_logs_are_json_in_every_process_or_in_none() -> None:
    plan = plan_of(replace(SIM, json_logs=True, log_level="info"))
    for spec in (*plan.nodes, plan.router):
        _, child = child_options(spec)
        assert isinstance(child, CommonOptions)
        assert (child.json_logs, child.log_level) == (True, "info")
    engine = node_settings(NodeOptions(engine="sim", json_logs=True, log_level="error"), "decode")
    assert (engine.json_logs, engine.log_level) == (True, "ERROR")


def test_threads_are_the_flag_s_value_or_a_share_of_the_cores() -> None:
    def threads(options: UpOptions) -> list[int | None]:
        children = [child_options(spec)[1] for spec in plan_of(options).nodes]
        return [child.threads for child in children if isinstance(child, NodeOptions)]

    assert threads(replace(SIM, threads=3)) == [3, 3, 3]
    assert all(count is not None and count >= 1 for count in threads(SIM))


def test_flags_become_the_node_s_own_settings(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("llama-gqa1")
    options = NodeOptions(
        model=str(folder),
        node="n",
        dtype="float32",
        kv_blocks=9,
        max_batched_tokens=7,
        threads=2,
        link_grace_s=9,
    )
    settings = node_settings(options, "prefill")
    assert (settings.node, settings.role, settings.model) == ("n", "prefill", str(folder))
    assert settings.model_name() == "llama-gqa1"
    assert (settings.dtype, settings.kv_blocks) == ("float32", 9)
    assert (settings.max_batched_tokens, settings.threads, settings.link_grace_s) == (7, 2, 9)
    assert settings.index_url == ""


def test_the_simulated_engine_s_flags_reach_the_node_s_settings() -> None:
    options = NodeOptions(
        engine="sim", sim=SimConfig(prefill_ms_per_token=0.5, layers=3, poison_token=9)
    )
    settings = node_settings(options, "decode")
    assert settings.sim == SimConfig(prefill_ms_per_token=0.5, layers=3, poison_token=9)
    assert (settings.model, settings.model_name()) == ("", "sim")


@pytest.mark.parametrize("engine", ["sim", "torch"])
def test_nodes_serve_the_names_of_the_parsers_given_to_up(
    engine: EngineKind, tiny_model: Callable[[str], Path]
) -> None:
    folder = "" if engine == "sim" else str(tiny_model("llama-gqa1"))
    plain = replace(SIM, engine=engine, model=folder, dtype="float32")

    def served(options: UpOptions) -> dict[str, bytes]:
        _, child = child_options(plan_of(options).nodes[1])
        assert isinstance(child, NodeOptions)
        return load_artifacts(node_settings(child, "decode"))

    files = served(replace(plain, tool_parser="hermes", reasoning_parser="none"))
    assert json.loads(files.pop(BATON)) == {"tool_parser": "hermes", "reasoning_parser": "none"}
    assert files == served(plain)


def test_a_router_has_several_model_names_and_a_node_one() -> None:
    names = ("--served-model-name", "a", "org/b", "--served-model-name=c")
    _, router = read_command(["router", *names, "--nodes", "http://127.0.0.1:1"], {})
    assert isinstance(router, RouterOptions)
    assert router_settings(router).served_model_name == ("a", "org/b", "c")
    options = replace(SIM, served_model_name=("a", "b"))
    for spec in plan_of(options).nodes:
        _, node = child_options(spec)
        assert isinstance(node, NodeOptions)
        assert node_settings(node, "decode").model_name() == "a"
    with pytest.raises(CommandError, match="--served-model-name a b: a node reports one name"):
        node_settings(NodeOptions(engine="sim", served_model_name=("a", "b")), "decode")


@pytest.mark.parametrize("flag", ["tool_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused(flag: str) -> None:
    unknown: dict[str, Any] = {flag: "nope"}
    with pytest.raises(CommandError, match=f"no {flag.replace('_', ' ')} is named 'nope'"):
        node_settings(NodeOptions(engine="sim", **unknown), "decode")


def test_up_settles_model_folder_name_and_dtype(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("llama-gqa1")
    settled = settle(UpOptions(model=os.path.relpath(folder)))
    assert settled.model == str(folder)
    assert settled.served_model_name == ("llama-gqa1",)
    assert settled.dtype == "float32"  # as its config says
    assert settle(UpOptions(model=str(folder), served_model_name=("x",))).served_model_name == (
        "x",
    )


def test_a_node_without_a_model_is_refused() -> None:
    with pytest.raises(CommandError, match="--model is missing"):
        node_settings(NodeOptions(), "decode")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("pool.local", "http://pool.local:80"),
    ],
)
def test_the_shown_url_can_be_connected_to(host: str, url: str) -> None:
    assert RouterAddress(host, 80).url == url


def test_an_answer_is_shown_with_its_placement_and_timings() -> None:
    answer = ChatAnswer("Paris.", "prefill=- decode=d", 0.25, 1.25, tokens=11, prompt_tokens=7)
    assert show_answer(answer, 5.0).splitlines() == [
        "Paris.",
        "",
        "placement  prefill=- decode=d",
        "timings    ready 5.0 s after start; 7 prompt tokens, first token 250 ms;"
        " 11 tokens in 1.25 s (10.0 tokens/s after the first)",
    ]


def test_the_ready_message_holds_a_curl_command() -> None:
    options, address = replace(SIM, served_model_name=("m",)), RouterAddress("127.0.0.1", 8123)
    shown = show_ready(options, address, 1.0, "chunks: such and such")
    assert "\nchunks: such and such\n" in shown
    assert "ready after 1.0 s: http://127.0.0.1:8123/v1 serves m;" in shown
    assert "curl http://127.0.0.1:8123/v1/chat/completions" in shown
    assert "Authorization" not in shown


@pytest.mark.parametrize(
    ("options", "address", "shown"),
    [
        (SIM, RouterAddress("127.0.0.1", 8123), ["watch it: http://127.0.0.1:8123/"]),
        (replace(SIM, page=False), RouterAddress("127.0.0.1", 8123), []),
        (SIM, RouterAddress("", 0, uds="/run/router.sock"), []),
    ],
)
def test_the_ready_message_names_the_live_page_if_a_browser_can_open_it(
    options: UpOptions, address: RouterAddress, shown: list[str]
) -> None:
    lines = show_ready(options, address, 1.0, "").splitlines()
    assert [line for line in lines if line.startswith("watch")] == shown


@pytest.mark.integration
async def test_up_passes_a_unix_socket_on_and_asks_the_router_there(tmp_path: Path) -> None:
    options = replace(SIM, uds="/run/baton/router.sock")
    plan = plan_of(options)
    _, child = child_options(plan.router)
    assert isinstance(child, RouterOptions)
    assert router_settings(child).uds == options.uds
    shown = show_ready(options, plan.address, 1.0, "")
    assert "http://localhost/v1 on unix:/run/baton/router.sock serves" in shown
    assert "--unix-socket /run/baton/router.sock" in shown.partition("try: ")[2]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        body = head.split()[1].encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    address = RouterAddress("", 0, uds=str(tmp_path / "router.sock"))
    async with await asyncio.start_unix_server(answer, address.uds):
        assert await asyncio.to_thread(get_page, address, "/ready") == (200, b"/ready")


def test_the_curl_command_shows_where_the_api_key_goes() -> None:
    options, address = replace(SIM, api_keys="keys.txt"), RouterAddress("127.0.0.1", 8123)
    shown = show_ready(options, address, 1.0, "")
    assert shlex.split(shown.partition("try: ")[2])[4:6] == ["-H", "Authorization: Bearer KEY"]
