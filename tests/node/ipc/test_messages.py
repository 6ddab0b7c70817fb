"""Frames between a node's server process and its engine process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.interface import TokenOut
from baton_node.ipc.framing import MAX_FRAME, FrameError, Unpacker, pack
from baton_node.ipc.messages import (
    FinishChoice,
    Start,
    Step,
    to_engine_codec,
    to_server_codec,
)
from baton_node.settings import NodeSettings
from baton_protocol.ids import Epoch, RequestId


@given(st.lists(st.binary(max_size=40), max_size=6), st.data())
def test_a_stream_cut_anywhere_gives_the_same_payloads(
    payloads: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(pack(payload) for payload in payloads)
    unpacker = Unpacker()
    unpacked: list[bytes] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        unpacked.extend(unpacker.feed(stream[:size]))
        stream = stream[size:]
    assert unpacked == payloads


def test_an_impossible_length_is_an_error() -> None:
    with pytest.raises(FrameError, match=str(MAX_FRAME)):
        list(Unpacker().feed(b"\xff\xff\xff\xff"))


def test_decoding_an_encoded_record_returns_it() -> None:
    engine, server = to_engine_codec(), to_server_codec()
    start = Start(NodeSettings(node="n", role="decode", data_urls=("unix:///a",)), Epoch("e"))
    assert engine.decode(engine.encode(start)) == start
    finish = FinishChoice(RequestId("r"), 1, 2)
    assert engine.decode(engine.encode(finish)) == finish
    step = Step(tokens=(TokenOut(RequestId("r"), 1, 0, 3, 99, None, "stop", 99),))
    assert server.decode(server.encode(step)) == step
