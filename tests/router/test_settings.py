"""Router settings: wrong values are errors that name the setting."""

from __future__ import annotations

import pytest

from baton_protocol.errors import InvalidRequest
from baton_router.settings import RouterSettings

NODES = ("http://127.0.0.1:9000",)


def test_a_router_with_nodes_or_an_index_may_start() -> None:
    RouterSettings(nodes=NODES).check()
    RouterSettings(index_url="redis://127.0.0.1").check()


@pytest.mark.parametrize("nodes", [(), ("127.0.0.1:9000",)])
def test_a_router_without_nodes_or_with_a_wrong_address_is_refused(nodes: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match="node") as caught:
        RouterSettings(nodes=nodes).check()
    assert caught.value.param == "nodes"
