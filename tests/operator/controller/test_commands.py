"""Containers get only flags that `baton` and redis-server accept."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from baton_cli.commands.fetch_options import FetchOptions
from baton_cli.commands.role_settings import node_settings, router_settings
from baton_cli.main import read_command
from baton_cli.options.records import CommonOptions, NodeOptions, RouterOptions
from baton_engine.config.speculative import SpeculativeConfig
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.settings import StoreSettings
from baton_operator.builders import build_pool
from baton_operator.builders.nodes import revision_of
from baton_protocol.model_source import HubModel, parse_source
from baton_protocol.store import Role
from tests.support.clients.http import complete, exchange
from tests.support.kubernetes.manifests import (
    CREDENTIALS,
    SAMPLES,
    USER_SECRETS,
    containers,
    environment,
    expanded,
    sample_pool,
    secret_values,
    templates,
)
from tests.support.pools.manifest_pool import ManifestPool, redis_client

NAME, IP = "demo-decode-0123456789-abcde", "10.244.0.7"
POD = {"metadata.name": NAME, "status.podIP": IP}
PASSWORD = CREDENTIALS.redis_password
PROMPT = list(range(65, 65 + 50))


def commands(name: str, **spec: Any) -> Iterator[tuple[str, CommonOptions]]:
    """Yield the command and options of each `baton` container, read as its process reads them."""
    manifests = build_pool(sample_pool(name, **spec))
    secrets = secret_values(manifests) | USER_SECRETS
    for template in templates(manifests).values():
        for container in containers(template):
            if container.get("command") == ["baton"]:
                variables = environment(container, POD, secrets)
                args = expanded(container, variables)
                command, options = read_command(args, variables)
                yield command.words, options


@pytest.mark.parametrize("name", SAMPLES)
def test_the_command_line_accepts_the_arguments_of_every_container(name: str) -> None:
    pool = sample_pool(name)
    found = list(commands(name))
    expected = ["prefill", "decode", "router"]
    if pool.spec.model.uri.startswith("hf://"):
        expected = ["model fetch", "prefill", "model fetch", "decode", "router"]
    assert [command for command, _ in found] == expected
    for _, options in found:
        assert isinstance(options, NodeOptions | RouterOptions | FetchOptions)
        assert options.pool == f"{pool.namespace}.{pool.name}"
        assert options.json_logs


@pytest.mark.parametrize("name", SAMPLES)
def test_every_client_of_the_store_has_the_login_and_every_link_the_token(name: str) -> None:
    login = ("", CREDENTIALS.redis_password)
    if name == "external":
        login = ("reader-writer", "pass:word@with/signs")
    for _, options in commands(name):
        assert isinstance(options, NodeOptions | RouterOptions | FetchOptions)
        assert (options.redis_username, options.redis_password) == login
        if not isinstance(options, FetchOptions):
            assert options.link_token == CREDENTIALS.link_token


def test_extra_flags_reach_their_process() -> None:
    found = dict(commands("hub"))
    node, router = found["decode"], found["router"]
    assert isinstance(node, NodeOptions)
    assert isinstance(router, RouterOptions)
    assert (node.kv_memory, node.max_num_seqs) == (2 << 30, 64)
    assert router.request_timeout_s == 900


@pytest.mark.parametrize("name", ["hub", "host"])
def test_the_model_is_fetched_into_the_folder_that_the_node_reads(name: str) -> None:
    found = dict(commands(name))
    fetch, node = found["model fetch"], found["decode"]
    assert isinstance(fetch, FetchOptions)
    assert isinstance(node, NodeOptions)
    source = parse_source(fetch.source)
    assert isinstance(source, HubModel)
    assert node.model == f"{fetch.to}/{source.folder_name}"
    assert (fetch.node, fetch.redis_index) == (node.node, node.index_url)


def test_tls_urls_name_the_mounted_ca_certificate() -> None:
    found = dict(commands("external"))
    node, router = found["decode"], found["router"]
    assert isinstance(node, NodeOptions)
    assert isinstance(router, RouterOptions)
    index, plain, data = (parse_endpoint(url) for url in (router.index_url, *node.data_urls))
    assert (plain.kind, plain.options) == ("tcp", ())
    for endpoint in (index, data):
        assert endpoint.kind == "tls"
        assert endpoint.options == (("ssl_ca_certs", "/etc/baton/redis-ca/ca.crt"),)
    for name, template in templates(build_pool(sample_pool("external"))).items():
        [container] = template["spec"]["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted["redis-ca"] == "/etc/baton/redis-ca", name


@pytest.mark.parametrize("name", SAMPLES)
def test_nodes_get_the_spec_their_pod_s_name_and_address_and_a_valid_store(name: str) -> None:
    pool = sample_pool(name)
    spec = pool.spec
    for role, options in commands(name):
        if not isinstance(options, NodeOptions):
            continue
        assert options.node == NAME, role
        assert options.address == f"http://{IP}:{options.port}"
        assert options.revision == revision_of(pool).name
        if not spec.model.uri:
            assert options.model == spec.model.path
        assert (options.engine, options.dtype) == (spec.engine.kind, spec.engine.dtype)
        assert options.block_size == spec.engine.block_size
        assert options.chunk_blocks == spec.engine.chunk_blocks
        assert options.max_model_len == spec.engine.max_model_len
        assert options.kv_cache_dtype == (spec.engine.kv_cache_dtype or "auto")
        assert options.store_codec == (spec.engine.store_codec or "none")
        StoreSettings(
            index_url=options.index_url, data_urls=options.data_urls, pool=options.pool
        ).check()


@pytest.mark.parametrize(("field", "option"), [(True, "on"), (False, "off"), (None, "auto")])
def test_nodes_are_batch_invariant_as_the_spec_says(field: bool | None, option: str) -> None:
    engine = {"kind": "torch", "batchInvariant": field}
    for role, options in commands("torch", engine=engine):
        if isinstance(options, NodeOptions):
            assert options.batch_invariant == option, role


@pytest.mark.parametrize(("field", "option"), [("int4", "int4"), (None, "none")])
def test_nodes_quantize_weights_as_the_spec_says(field: str | None, option: str) -> None:
    for role, options in commands("torch", engine={"kind": "torch", "quantization": field}):
        if isinstance(options, NodeOptions):
            assert options.quantization == option, role


def test_nodes_make_the_drafts_that_the_spec_says() -> None:
    field = {"method": "ngram", "num_speculative_tokens": 6}
    for role, options in commands("torch", engine={"kind": "torch", "speculativeConfig": field}):
        if isinstance(options, NodeOptions):
            config = SpeculativeConfig.parse(options.speculative_config or "")
            assert (config.method, config.num_speculative_tokens) == ("ngram", 6), role


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_simulated_node_s_options_become_its_settings(role: Role) -> None:
    options = dict(commands("sim"))[role]
    assert isinstance(options, NodeOptions)
    assert node_settings(options, role).chunk_blocks == 1


@pytest.mark.parametrize("name", SAMPLES)
def test_the_router_gets_the_index_of_the_nodes_and_the_hand_off_settings(name: str) -> None:
    found = dict(commands(name))
    router, node = found["router"], found["decode"]
    assert isinstance(router, RouterOptions)
    assert isinstance(node, NodeOptions)
    router_settings(router).check()
    assert (router.index_url, router.pool) == (node.index_url, node.pool)
    spec = sample_pool(name).spec
    assert (router.handoff, router.missing_role) == (spec.handoff, spec.missing_role_policy)
    assert router.served_model_name == sample_pool(name).spec.model_names


def test_only_the_router_gets_the_api_keys_and_the_tenant_secret() -> None:
    router = dict(commands("hub"))["router"]
    assert isinstance(router, RouterOptions)
    assert (router.sharing, router.tenant_secret) == ("tenant", CREDENTIALS.tenant_secret)
    key_files = {}
    for name, template in templates(build_pool(sample_pool("hub"))).items():
        pod = template["spec"]
        mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
        for volume in pod["volumes"]:
            if volume.get("secret", {}).get("secretName") == "tenants":
                [item] = volume["secret"]["items"]
                key_files[name] = f"{mounts[volume['name']]}/{item['path']}"
        names = {one["name"] for one in pod["containers"][0].get("env", ())}
        assert ("BATON_TENANT_SECRET" in names) == (name == "hub-router")
    assert key_files == {"hub-router": router.api_keys}


@pytest.mark.parametrize("name", sorted({*SAMPLES} - {"hub"}))
def test_a_router_without_an_api_key_secret_requires_no_key(name: str) -> None:
    router = dict(commands(name))["router"]
    assert isinstance(router, RouterOptions)
    assert (router.api_keys, router.sharing, router.tenant_secret) == ("", "pool", "")


def test_a_pool_that_shares_its_store_may_require_api_keys() -> None:
    keys = {"apiKeysSecret": {"name": "tenants", "key": "keys.txt"}}
    router = dict(commands("sim", router=keys))["router"]
    assert isinstance(router, RouterOptions)
    assert router.api_keys == "/etc/baton/api-keys/keys.txt"
    assert (router.sharing, router.tenant_secret) == ("pool", "")


def test_a_dollar_in_a_path_is_not_a_variable() -> None:
    found = dict(commands("torch", model={"path": "/models/$(POD_IP)/$$x"}))
    options = found["decode"]
    assert isinstance(options, NodeOptions)
    assert options.model == "/models/$(POD_IP)/$$x"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManifestPool]:
    """A pool of the sample's commands as processes; every probe has passed once."""
    with ManifestPool(sample_pool("sim"), tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.mark.integration
def test_a_pool_started_from_its_manifests_hands_off_and_answers(
    running: ManifestPool,
) -> None:
    answer = complete(running.url_of("router"), PROMPT, max_tokens=8, temperature=0)
    placement = answer.headers["x-baton-placement"]
    assert running.pod_name("prefill") in placement
    assert running.pod_name("decode") in placement
    [node, _] = exchange(running.url_of("router"), "/pool").body["nodes"]
    assert node["revision"] == revision_of(sample_pool("sim")).name


@pytest.mark.integration
def test_a_pool_with_tenants_accepts_only_keys_of_its_secret(tmp_path: Path) -> None:
    keys = {"apiKeysSecret": {"name": "tenants", "key": "keys.txt"}}
    pool = sample_pool("sim", router=keys, kvStore={"sharing": "tenant"})
    key = USER_SECRETS["tenants"]["keys.txt"].split()[1]
    with ManifestPool(pool, tmp_path) as tenants:
        url, body = tenants.url_of("router"), {"prompt": PROMPT, "max_tokens": 2}
        statuses = [
            exchange(url, "/v1/completions", body, headers).status
            for headers in ({}, {"Authorization": f"Bearer {key}"})
        ]
        output = tenants.command_line("router") + tenants.log("router")
    assert statuses == [401, 200]
    assert key not in output
    assert CREDENTIALS.tenant_secret not in output


@pytest.mark.integration
@pytest.mark.parametrize("component", ["kv-index", "kv-data"])
def test_a_managed_server_has_the_settings_of_an_embedded_one(
    running: ManifestPool, component: str
) -> None:
    names = ("save", "appendonly", "maxmemory", "maxmemory-policy", "maxmemory-samples")
    with EmbeddedStore() as embedded:
        url = embedded.index_url if component == "kv-index" else embedded.data_urls[0]
        with (
            closing(redis_client(url)) as expected,
            closing(redis_client(running.url_of(component), PASSWORD)) as managed,
        ):
            for name in names:
                assert managed.config_get(name) == expected.config_get(name)


@pytest.mark.integration
@pytest.mark.parametrize("component", ["kv-index", "kv-data"])
@pytest.mark.parametrize("password", [None, CREDENTIALS.link_token])
def test_a_managed_server_refuses_clients_without_the_pool_s_password(
    running: ManifestPool, component: str, password: str | None
) -> None:
    with (
        closing(redis_client(running.url_of(component), password)) as client,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        client.ping()


@pytest.mark.integration
def test_a_node_refuses_links_without_the_pool_s_token(running: ManifestPool) -> None:
    node = running.url_of("decode")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{node}/link", timeout=120)
    assert exchange(node, "/health").status == 200


@pytest.mark.integration
def test_no_process_shows_a_secret_in_its_command_line_or_its_log(running: ManifestPool) -> None:
    for component in ("kv-index", "kv-data", "prefill", "decode", "router"):
        command, log = running.command_line(component), running.log(component)
        assert ("redis-server" if component.startswith("kv-") else "--port=") in command
        for secret in (CREDENTIALS.redis_password, CREDENTIALS.link_token):
            assert secret not in command
            assert secret not in log
