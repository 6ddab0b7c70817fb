"""BATON_* variables: Baton's own, those that Kubernetes sets for services, and mistakes."""

from __future__ import annotations

import pytest

from baton_cli.errors import UsageError
from baton_cli.main import COMMANDS, known_variables
from baton_cli.options.environment import for_children, is_service_variable, own_variables

# The variables that Kubernetes sets in a namespace with services `baton` and `baton-router`.
SERVICE_VARIABLES = {
    "BATON_SERVICE_HOST": "10.0.0.1",
    "BATON_SERVICE_PORT": "8000",
    "BATON_SERVICE_PORT_HTTP": "8000",
    "BATON_PORT": "tcp://10.0.0.1:8000",
    "BATON_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "BATON_PORT_8000_TCP_PROTO": "tcp",
    "BATON_PORT_8000_TCP_PORT": "8000",
    "BATON_PORT_8000_TCP_ADDR": "10.0.0.1",
    "BATON_ROUTER_SERVICE_HOST": "10.0.0.2",
    "BATON_ROUTER_SERVICE_PORT": "80",
    "BATON_ROUTER_PORT": "udp://10.0.0.2:80",
    "BATON_ROUTER_PORT_80_SCTP": "sctp://10.0.0.2:80",
}


def test_kubernetes_service_variables_are_ignored() -> None:
    assert own_variables(SERVICE_VARIABLES, known_variables()) == {}


def test_a_numeric_baton_port_is_our_variable() -> None:
    assert own_variables({"BATON_PORT": "9000"}, known_variables()) == {"BATON_PORT": "9000"}


def test_an_unknown_variable_is_an_error_that_names_the_closest_one() -> None:
    with pytest.raises(UsageError, match="unknown variable BATON_KV_MEMROY; did you mean BATON_KV"):
        own_variables({"BATON_KV_MEMROY": "1GiB"}, known_variables())


def test_an_unknown_variable_without_a_close_match_is_an_error_too() -> None:
    with pytest.raises(UsageError, match="unknown variable BATON_QQQQQQQQ; baton COMMAND --help"):
        own_variables({"BATON_QQQQQQQQ": "1"}, known_variables())


def test_an_empty_variable_counts_as_unset() -> None:
    assert own_variables({"BATON_MODEL": ""}, known_variables()) == {}


def test_variables_of_other_programs_are_ignored() -> None:
    assert own_variables({"BATONS": "x", "PATH": "/bin"}, known_variables()) == {}


def test_children_inherit_all_variables_except_ours() -> None:
    environ = {"PATH": "/bin", "HF_ENDPOINT": "http://h", "BATON_PORT": "1", **SERVICE_VARIABLES}
    assert for_children(environ) == {"PATH": "/bin", "HF_ENDPOINT": "http://h"}


def test_no_flag_s_variable_looks_like_a_service_variable() -> None:
    assert COMMANDS
    assert [name for name in known_variables() if is_service_variable(name, "1")] == []
