"""Keys and tenants by flags: what `up` and `router` refuse, make up, and tell nobody else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton_cli.commands.roles import router_settings
from baton_cli.commands.up import make_plan, settle
from baton_cli.errors import CommandError
from baton_cli.local_pool.store import StoreUrls
from baton_cli.main import read_command
from baton_cli.options.records import NodeOptions, RouterOptions, UpOptions
from tests.support.project.command import baton_process

pytestmark = pytest.mark.integration

KEY, SECRET = "sk-key-of-acme", "the pool's secret"
STORE = StoreUrls("unix:///s/index.sock", ("unix:///s/a.sock",))
SIM = UpOptions(engine="sim")


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(f"acme {KEY}\n")
    return str(path)


def test_the_router_of_a_pool_hears_of_its_tenants_and_no_node_does(keys: str) -> None:
    options = replace(SIM, api_keys=keys, sharing="tenant", tenant_secret=SECRET)
    plan = make_plan(settle(options), STORE, {})
    command, told = read_command(plan.router.argv[3:], plan.router.variables)
    assert command.words == "router"
    assert isinstance(told, RouterOptions)
    settings = router_settings(told)
    settings.check()
    assert (settings.api_keys, settings.sharing) == (keys, "tenant")
    assert settings.tenant_secret == SECRET
    for spec in (*plan.nodes, plan.router):
        assert SECRET not in " ".join(spec.argv) + repr(spec)
    for spec in plan.nodes:
        assert isinstance(read_command(spec.argv[3:], spec.variables)[1], NodeOptions)
        assert "tenant" not in " ".join([*spec.argv, *spec.variables])


def test_a_pool_without_a_secret_makes_one_for_its_own_lifetime(keys: str) -> None:
    options = replace(SIM, api_keys=keys, sharing="tenant")
    made = [settle(options).tenant_secret for _ in range(2)]
    assert made[0] != made[1]
    assert min(map(len, made)) == 64
    assert settle(replace(SIM, api_keys=keys)).tenant_secret == ""


def test_a_pool_with_keys_has_an_admin_key_for_its_own_table(keys: str) -> None:
    made = [settle(replace(SIM, api_keys=keys)) for _ in range(2)]
    assert made[0].admin_key != made[1].admin_key
    assert min(len(one.admin_key) for one in made) == 64
    plan = make_plan(made[0], STORE, {})
    assert plan.address.key == plan.router.variables["BATON_ADMIN_KEY"] == made[0].admin_key
    assert made[0].admin_key not in repr(plan.address) + repr(plan.router)
    assert settle(replace(SIM, api_keys=keys, admin_key="mine")).admin_key == "mine"
    assert settle(SIM).admin_key == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sharing": "tenant", "api_keys": ""}, "give --api-keys FILE, or --sharing pool"),
        ({"once": "Hi"}, "--once and --ask say no API key: leave them out"),
        ({"ask": "Hi"}, "--once and --ask say no API key: leave them out"),
        ({"api_keys": "", "tenants": "/no/such/limits"}, "--tenants /no/such/limits: No such file"),
        ({"tenants": "/no/such/limits"}, "--tenants /no/such/limits: No such file"),
        ({"api_keys": "/no/such/keys"}, "--api-keys /no/such/keys: No such file"),
    ],
)
def test_what_up_cannot_do_with_keys_is_said_before_anything_starts(
    keys: str, changes: dict[str, str], told: str
) -> None:
    with pytest.raises(CommandError, match=told):
        settle(replace(SIM, **({"api_keys": keys} | changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "variables", "told"),
    [
        (["--sharing=tenant"], {"BATON_TENANT_SECRET": SECRET}, "give a file of API keys"),
        (["--sharing=tenant", "--api-keys=KEYS"], {}, "BATON_TENANT_SECRET"),
        (["--api-keys=WRONG"], {}, "WRONG, line 1: 3 words; write TENANT KEY"),
    ],
)
def test_a_router_that_cannot_tell_tenants_apart_ends_with_one_line(
    tmp_path: Path, keys: str, flags: list[str], variables: dict[str, str], told: str
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(f"acme {KEY} more\n")
    words = [word.replace("KEYS", keys).replace("WRONG", str(wrong)) for word in flags]
    done = baton_process(
        "router", "--nodes=http://127.0.0.1:1", "--port=0", *words, variables=variables
    )
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert told.replace("WRONG", str(wrong)) in line
    assert KEY not in line
    assert SECRET not in line
