"""Router settings: wrong values are errors that name the setting."""

from __future__ import annotations

from typing import Any

import pytest

from baton_protocol.errors import InvalidRequest
from baton_router.settings import RouterSettings

NODES = ("http://127.0.0.1:9000",)


def test_a_router_with_nodes_or_an_index_may_start() -> None:
    RouterSettings(nodes=NODES).check()
    RouterSettings(index_url="redis://127.0.0.1").check()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"nodes": ()}, "nodes"),
        ({"nodes": ("127.0.0.1:9000",)}, "nodes"),
        ({"port": 70000}, "port"),
        ({"port": -1}, "port"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"request_timeout_s": 0.0}, "request_timeout_s"),
        ({"stall_timeout_s": 0.0}, "stall_timeout_s"),
        ({"keepalive_s": 0.0}, "keepalive_s"),
        ({"link_patience_s": -1.0}, "link_patience_s"),
        ({"unready_wait_s": -1.0}, "unready_wait_s"),
        ({"wake_wait_s": -1.0}, "wake_wait_s"),
        ({"wake_wait_s": float("nan")}, "wake_wait_s"),
        ({"handoff_min_tokens": -1}, "handoff_min_tokens"),
        ({"served_model_name": ("a", "b", "a")}, "served_model_name"),
        ({"root_path": "llm"}, "root_path"),
        ({"root_path": "/llm/"}, "root_path"),
        ({"root_path": "/"}, "root_path"),
        ({"root_path": "/a?b"}, "root_path"),
        ({"root_path": "//a"}, "root_path"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(changes: dict[str, Any], name: str) -> None:
    settings = RouterSettings(**({"nodes": NODES} | changes))
    with pytest.raises(InvalidRequest) as caught:
        settings.check()
    assert caught.value.param == name
    assert name in caught.value.message or "node" in caught.value.message
