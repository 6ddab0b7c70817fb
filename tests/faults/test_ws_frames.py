"""The Splitter, through which fault tests see the frames between a router and a node."""

from __future__ import annotations

import pytest

from tests.support.wires.ws_frames import Splitter

ASKED = b"GET /link HTTP/1.1\r\nUpgrade: websocket\r\n\r\n"
FRAME = b"\x82\x02hi"


@pytest.mark.parametrize("refusals", [0, 1, 2])
def test_frames_are_found_after_refused_links_on_the_same_connection(refusals: int) -> None:
    splitter = Splitter()
    pieces = [piece for _ in range(refusals + 1) for piece in splitter.feed(ASKED)]
    assert [piece.raw for piece in pieces] == [ASKED] * (refusals + 1)
    assert [piece.message for piece in splitter.feed(FRAME * 2)] == [b"hi", b"hi"]
