"""Which BATON_* variables are ours, which are Kubernetes', which are mistakes."""

from __future__ import annotations

import pytest

from baton_cli.errors import UsageError
from baton_cli.main import COMMANDS, known_variables
from baton_cli.options.environment import for_children, is_service_variable, own_variables

# What Kubernetes sets in a namespace with services called `baton` and `baton-router`.
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


def test_a_port_that_is_a_number_is_ours() -> None:
    assert own_variables({"BATON_PORT": "9000"}, known_variables()) == {"BATON_PORT": "9000"}


def test_an_unknown_variable_is_an_error_that_names_the_closest_one() -> None:
    with pytest.raises(UsageError, match="unknown variable BATON_KV_MEMROY; did you mean BATON_KV"):
        own_variables({"BATON_KV_MEMROY": "1GiB"}, known_variables())


def test_a_variable_like_no_other_is_an_error_too() -> None:
    with pytest.raises(UsageError, match="unknown variable BATON_QQQQQQQQ; baton COMMAND --help"):
        own_variables({"BATON_QQQQQQQQ": "1"}, known_variables())


def test_an_empty_variable_counts_as_not_set() -> None:
    assert own_variables({"BATON_MODEL": ""}, known_variables()) == {}


def test_other_programs_variables_are_none_of_our_business() -> None:
    assert own_variables({"BATONS": "x", "PATH": "/bin"}, known_variables()) == {}


def test_children_inherit_everything_but_our_variables() -> None:
    environ = {"PATH": "/bin", "HF_ENDPOINT": "http://h", "BATON_PORT": "1", **SERVICE_VARIABLES}
    assert for_children(environ) == {"PATH": "/bin", "HF_ENDPOINT": "http://h"}


def test_no_flag_has_a_variable_that_looks_like_a_service() -> None:
    assert COMMANDS
    assert [name for name in known_variables() if is_service_variable(name, "1")] == []
