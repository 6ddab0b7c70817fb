"""API keys and tenants by flags: what `up` and `router` refuse, generate and keep secret."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton_cli.commands.role_settings import router_settings
from baton_cli.commands.up import run, settle
from baton_cli.commands.up_plan import make_plan
from baton_cli.errors import CommandError
from baton_cli.local_pool.store import StoreUrls
from baton_cli.main import read_command
from baton_cli.options.records import NodeOptions, RouterOptions, UpOptions
from tests.support.project.command import baton

pytestmark = pytest.mark.integration

KEY, SECRET = "sk-key-of-acme", "the pool's secret"
STORE = StoreUrls("unix:///s/index.sock", ("unix:///s/a.sock",))
SIM = UpOptions(engine="sim")


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(f"acme {KEY}\n")
    return str(path)


def test_only_the_router_gets_the_tenants_and_their_secret(keys: str) -> None:
    options = replace(SIM, api_keys=keys, sharing="tenant", tenant_secret=SECRET)
    plan = make_plan(settle(options), STORE, {})
    command, router = read_command(plan.router.argv[3:], plan.router.variables)
    assert command.words == "router"
    assert isinstance(router, RouterOptions)
    settings = router_settings(router)
    settings.check()
    assert (settings.api_keys, settings.sharing) == (keys, "tenant")
    assert settings.tenant_secret == SECRET
    for spec in (*plan.nodes, plan.router):
        assert SECRET not in " ".join(spec.argv) + repr(spec)
    for spec in plan.nodes:
        assert isinstance(read_command(spec.argv[3:], spec.variables)[1], NodeOptions)
        assert "tenant" not in " ".join([*spec.argv, *spec.variables])


def test_up_generates_a_tenant_secret_if_none_is_given(keys: str) -> None:
    options = replace(SIM, api_keys=keys, sharing="tenant")
    settled = [settle(options).tenant_secret for _ in range(2)]
    assert settled[0] != settled[1]
    assert min(map(len, settled)) == 64
    assert settle(replace(SIM, api_keys=keys)).tenant_secret == ""


def test_up_with_api_keys_generates_an_admin_key_for_its_table(keys: str) -> None:
    settled = [settle(replace(SIM, api_keys=keys)) for _ in range(2)]
    assert settled[0].admin_key != settled[1].admin_key
    assert min(len(one.admin_key) for one in settled) == 64
    plan = make_plan(settled[0], STORE, {})
    assert plan.address.key == plan.router.variables["BATON_ADMIN_KEY"] == settled[0].admin_key
    assert settled[0].admin_key not in repr(plan.address) + repr(plan.router)
    assert settle(replace(SIM, api_keys=keys, admin_key="mine")).admin_key == "mine"
    assert settle(SIM).admin_key == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sharing": "tenant", "api_keys": ""}, "give --api-keys FILE, or --sharing pool"),
        ({"api_keys": "", "tenants": "/no/such/limits"}, "--tenants /no/such/limits: No such file"),
        ({"tenants": "/no/such/limits"}, "--tenants /no/such/limits: No such file"),
        ({"api_keys": "/no/such/keys"}, "--api-keys /no/such/keys: No such file"),
    ],
)
def test_impossible_tenant_options_of_up_are_refused_before_the_start(
    keys: str, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(CommandError, match=message):
        settle(replace(SIM, **({"api_keys": keys} | changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize("question", [{"once": "Hi"}, {"ask": "Hi"}])
def test_a_question_to_a_pool_with_api_keys_is_refused(keys: str, question: Any) -> None:
    with pytest.raises(CommandError, match="--once and --ask send no API key: leave them out"):
        run(replace(SIM, api_keys=keys, **question))


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        (["--sharing=tenant"], {"BATON_TENANT_SECRET": SECRET}, "give a file of API keys"),
        (["--sharing=tenant", "--api-keys=KEYS"], {}, "BATON_TENANT_SECRET"),
        (["--api-keys=WRONG"], {}, "WRONG, line 1: the line has 3 words; write TENANT KEY"),
    ],
)
def test_a_router_that_cannot_tell_tenants_apart_exits_with_one_line(
    tmp_path: Path, keys: str, flags: list[str], variables: dict[str, str], message: str
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(f"acme {KEY} more\n")
    argv = [word.replace("KEYS", keys).replace("WRONG", str(wrong)) for word in flags]
    done = baton("router", "--nodes=http://127.0.0.1:1", "--port=0", *argv, variables=variables)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert message.replace("WRONG", str(wrong)) in line
    assert KEY not in line
    assert SECRET not in line
