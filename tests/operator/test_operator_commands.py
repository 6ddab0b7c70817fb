"""Containers are told what `baton` and redis-server really understand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from baton.main import read_command
from baton.options import CommonOptions, NodeOptions, RouterOptions
from baton.roles import node_settings, router_settings
from baton_kvstore.embedded import EmbeddedStore
from baton_kvstore.settings import StoreSettings
from baton_operator.builders import build_pool
from baton_operator.builders.nodes import revision_of
from baton_protocol.store import Role
from tests.support.http import complete, exchange
from tests.support.manifest_pool import ManifestPool, redis_client
from tests.support.manifests import SAMPLES, containers, expanded, sample_pool

POD = {"POD_NAME": "demo-decode-0123456789-abcde", "POD_IP": "10.244.0.7"}
PROMPT = list(range(65, 65 + 50))


def commands(name: str, **spec: Any) -> Iterator[tuple[str, CommonOptions]]:
    """Command and record of each `baton` container, read as the process itself reads them."""
    for manifest in build_pool(sample_pool(name, **spec)):
        for container in containers(manifest):
            if container["command"] == ["baton"]:
                command, options = read_command(expanded(container, POD), {})
                yield command.words, options


@pytest.mark.parametrize("name", SAMPLES)
def test_the_command_line_understands_every_container(name: str) -> None:
    pool = sample_pool(name)
    found = dict(commands(name))
    assert list(found) == ["prefill", "decode", "router"]
    for options in found.values():
        assert isinstance(options, NodeOptions | RouterOptions)
        assert options.pool == f"{pool.namespace}.{pool.name}"
        assert options.json_logs


@pytest.mark.parametrize("name", SAMPLES)
def test_nodes_are_told_the_spec_their_pod_and_a_store_that_can_work(name: str) -> None:
    pool = sample_pool(name)
    spec = pool.spec
    for role, options in commands(name):
        if not isinstance(options, NodeOptions):
            continue
        assert options.node == POD["POD_NAME"], role
        assert options.address == f"http://{POD['POD_IP']}:{options.port}"
        assert options.revision == revision_of(pool)
        assert options.model == spec.model.path
        assert (options.engine, options.dtype) == (spec.engine.kind, spec.engine.dtype)
        assert options.block_size == spec.engine.block_size
        assert options.chunk_blocks == spec.engine.chunk_blocks
        assert options.max_model_len == spec.engine.max_model_len
        StoreSettings(
            index_url=options.redis_index, data_urls=options.redis_data, pool=options.pool
        ).check()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_simulated_node_s_options_become_its_settings(role: Role) -> None:
    options = dict(commands("sim"))[role]
    assert isinstance(options, NodeOptions)
    assert node_settings(options, role).chunk_blocks == 1


@pytest.mark.parametrize("name", SAMPLES)
def test_the_router_is_told_where_nodes_register_and_when_to_split(name: str) -> None:
    told = dict(commands(name))
    router, node = told["router"], told["decode"]
    assert isinstance(router, RouterOptions)
    assert isinstance(node, NodeOptions)
    router_settings(router).check()
    assert (router.redis_index, router.pool) == (node.redis_index, node.pool)
    spec = sample_pool(name).spec
    assert (router.handoff, router.missing_role) == (spec.handoff, spec.missing_role_policy)


def test_a_dollar_in_a_path_is_not_a_variable() -> None:
    found = dict(commands("torch", model={"path": "/models/$(POD_IP)/$$x"}))
    options = found["decode"]
    assert isinstance(options, NodeOptions)
    assert options.model == "/models/$(POD_IP)/$$x"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManifestPool]:
    """The sample's commands as processes; every probe has passed once."""
    with ManifestPool(sample_pool("sim"), tmp_path_factory.mktemp("pool")) as pool:
        yield pool


def test_a_pool_made_of_its_manifests_commands_hands_over_and_answers(
    running: ManifestPool,
) -> None:
    answer = complete(running.url_of("router"), PROMPT, max_tokens=8, temperature=0)
    placement = answer.headers["x-baton-placement"]
    assert running.pod_name("prefill") in placement
    assert running.pod_name("decode") in placement
    [node, _] = exchange(running.url_of("router"), "/pool").body["nodes"]
    assert node["revision"] == revision_of(sample_pool("sim"))


@pytest.mark.parametrize("component", ["kv-index", "kv-data"])
def test_a_managed_server_is_set_up_as_an_embedded_one(
    running: ManifestPool, component: str
) -> None:
    names = ("save", "appendonly", "maxmemory", "maxmemory-policy", "maxmemory-samples")
    with EmbeddedStore() as embedded:
        url = embedded.index_url if component == "kv-index" else embedded.data_urls[0]
        with (
            closing(redis_client(url)) as ours,
            closing(redis_client(running.url_of(component))) as theirs,
        ):
            for name in names:
                assert theirs.config_get(name) == ours.config_get(name)
