"""The spec and the flags agree: extraArgs refuse exactly the flags that the operator sets itself,
and a field that passes through to a flag has its default and its choices."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
from msgspec.structs import replace

from baton_cli.main import read_command
from baton_cli.options.flag import flags_of
from baton_cli.options.records import NodeOptions, RouterOptions
from baton_operator.api.flags import NODE_FLAGS, ROUTER_FLAGS
from baton_operator.api.nodes import EngineSpec
from baton_operator.api.router import REQUEST_S
from baton_operator.api.spec import PoolSpec
from baton_operator.api.store import KVStoreSpec
from baton_operator.builders import build_pool
from baton_operator.builders.nodes import build_nodes
from tests.support.kubernetes.manifests import SAMPLES, containers, sample_pool, template_of

# Set by the operator, and still allowed: extraArgs come last and win. The operator does not see a
# GPU that a podTemplate or a resource claim adds instead of the limits.
ALLOWED = {"device"}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_flag_that_the_operator_sets_is_refused_in_extra_args(name: str) -> None:
    pool = sample_pool(name)
    extra = {*pool.spec.engine.extra_args, *pool.spec.router.extra_args}
    checked = set()
    for manifest in build_pool(pool):
        for container in containers(template_of(manifest)):
            role = (container.get("args") or [""])[0]
            if role in ("prefill", "decode", "router"):
                args = [arg for arg in container["args"][1:] if arg not in extra]
                given = {arg.removeprefix("--").partition("=")[0] for arg in args}
                assert given - ALLOWED <= {*(ROUTER_FLAGS if role == "router" else NODE_FLAGS)}
                checked.add(role)
    assert checked == {"prefill", "decode", "router"}


@pytest.mark.parametrize(
    ("names", "options"), [(NODE_FLAGS, NodeOptions), (ROUTER_FLAGS, RouterOptions)]
)
def test_every_flag_that_is_refused_exists(names: tuple[str, ...], options: type) -> None:
    assert {f"--{name}" for name in names} <= {flag.option for flag in flags_of(options)}


def test_a_device_in_extra_args_overrides_the_operator_s_own() -> None:
    engine = {"kind": "torch", "extraArgs": ["--device=cpu"]}
    limits = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    pool = sample_pool("torch", engine=engine, prefill=limits)
    [node] = containers(template_of(build_nodes(pool, "prefill", "r1", 1)))
    devices = [arg for arg in node["args"] if arg.startswith("--device=")]
    assert devices == ["--device=cuda", "--device=cpu"]
    command, options = read_command(node["args"], {})
    assert command.words == "prefill"
    assert isinstance(options, NodeOptions)
    assert options.device == "cpu"
    assert ALLOWED.isdisjoint(NODE_FLAGS)


def test_a_field_that_passes_through_has_the_default_and_the_choices_of_its_flag() -> None:
    """The operator leaves out a flag whose field has the default."""
    engine, store = EngineSpec(), KVStoreSpec()
    pool = PoolSpec(engine=replace(engine, kind="sim"))
    node, router = NodeOptions(), RouterOptions()
    assert (pool.handoff, pool.missing_role_policy) == (router.handoff, router.missing_role)
    assert (pool.router.placement, store.sharing) == (router.placement, router.sharing)
    assert router.request_timeout_s == REQUEST_S
    assert (engine.kind, engine.dtype) == (node.engine, node.dtype)
    assert (engine.block_size, engine.chunk_blocks) == (node.block_size, node.chunk_blocks)
    assert engine.max_model_len == node.max_model_len

    fields, flags = get_type_hints(EngineSpec), get_type_hints(NodeOptions)
    assert get_args(fields["kind"]) == get_args(flags["engine"])
    assert get_args(fields["dtype"]) == get_args(flags["dtype"])
