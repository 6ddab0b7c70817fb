"""`baton operator`: flags become the operator's settings."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

import pytest

from baton_cli.commands.operator import settings_of
from baton_cli.commands.operator_options import OperatorOptions
from baton_cli.errors import UsageError

IMAGES = {"node_image": "node:1", "router_image": "router:1", "redis_image": "redis:7"}


def options(**flags: Any) -> OperatorOptions:
    return OperatorOptions(**(IMAGES | flags))


def test_flags_become_the_installation() -> None:
    flags = options(pull_policy="Never", pull_secrets=("login",), namespace=("a", "b"))
    settings = settings_of(flags, {"POD_NAMESPACE": "baton-system"})
    installation = settings.installation
    assert (installation.images.node, installation.images.redis) == ("node:1", "redis:7")
    assert settings_of(options(sim_image="sim:1"), {}).installation.images.sim == "sim:1"
    assert installation.pull_policy == "Never"
    assert installation.pull_secrets == ("login",)
    assert installation.namespace == "baton-system"
    assert settings.namespaces == ("a", "b")


@pytest.mark.parametrize("image", IMAGES)
def test_a_missing_image_flag_is_an_error(image: str) -> None:
    flag = "--" + image.replace("_", "-")
    with pytest.raises(UsageError, match=f"{flag} is missing"):
        settings_of(options(**{image: ""}), {})


def test_leader_election_without_a_namespace_is_an_error() -> None:
    with pytest.raises(UsageError, match="POD_NAMESPACE"):
        settings_of(options(leader_elect=True), {})
    assert settings_of(options(leader_elect=True), {"POD_NAMESPACE": "x"}).leader_elect


def test_the_identity_of_a_pod_is_its_name() -> None:
    settings = settings_of(options(), {"POD_NAME": "baton-operator-5d4f-x2x9p"})
    assert settings.identity == "baton-operator-5d4f-x2x9p"


def test_outside_a_pod_the_identity_ends_with_the_process_id() -> None:
    assert settings_of(options(), {}).identity.rpartition("-")[2].isdigit()


def test_index_networks_are_parsed_and_a_wrong_network_is_named() -> None:
    settings = settings_of(options(index_networks=("10.20.0.0/16", "fd00::/8")), {})
    assert settings.index_networks == (ip_network("10.20.0.0/16"), ip_network("fd00::/8"))
    with pytest.raises(UsageError, match=r"--index-networks: 10\.20\.0\.1/16 has host bits set"):
        settings_of(options(index_networks=("10.20.0.1/16",)), {})
