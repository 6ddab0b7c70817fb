"""Large values go to a server one at a time, and little of them is on the way."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from baton_kvstore.connection.large_sends import (
    LARGE_BYTES,
    LEAST_BUFFER_BYTES,
    SendTurns,
    bound_send_buffer,
    send_buffer_bytes,
)
from tests.support.stores.kvstore import PATIENCE_S

ENDLESS_BYTES = 1 << 50  # its turn is worth a wait of days


def test_a_large_value_is_sent_after_the_one_before_it() -> None:
    turns, order = SendTurns(), list[str]()

    def second() -> None:
        with turns.turn(ENDLESS_BYTES, PATIENCE_S):
            order.append("second")

    with turns.turn(ENDLESS_BYTES, PATIENCE_S):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join(PATIENCE_S)
    assert order == ["first", "second"]


@pytest.mark.parametrize(
    ("size", "left_s"),
    [
        pytest.param(LARGE_BYTES - 1, PATIENCE_S, id="a small value does not wait"),
        pytest.param(LARGE_BYTES, PATIENCE_S, id="a large one waits as long as its bytes take"),
        pytest.param(ENDLESS_BYTES, 0.01, id="a put waits no longer than its deadline allows"),
    ],
)
def test_no_value_waits_for_long(size: int, left_s: float) -> None:
    turns = SendTurns()
    with turns.turn(ENDLESS_BYTES, PATIENCE_S):
        began = time.monotonic()
        with turns.turn(size, left_s):
            assert time.monotonic() - began < PATIENCE_S / 2


def test_a_send_that_fails_gives_its_turn_away() -> None:
    turns = SendTurns()
    with pytest.raises(OSError, match="gone"), turns.turn(ENDLESS_BYTES, PATIENCE_S):
        raise OSError("gone")
    began = time.monotonic()
    with turns.turn(ENDLESS_BYTES, PATIENCE_S):
        assert time.monotonic() - began < PATIENCE_S / 2


@pytest.mark.parametrize(
    ("round_trip_s", "size"),
    [
        (0.0, None),  # the kernel does not know
        (0.000_010, LEAST_BUFFER_BYTES),
        (0.000_200, 600_000),
        (0.000_349, 1_047_000),
        (0.000_350, None),
        (0.050, None),
    ],
)
def test_the_send_buffer_holds_what_a_fast_link_carries_in_a_round_trip(
    round_trip_s: float, size: int | None
) -> None:
    assert send_buffer_bytes(round_trip_s) == size


@pytest.mark.integration
def test_a_connection_to_the_same_machine_has_a_small_send_buffer() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as link,
    ):
        bound_send_buffer(link)
        size = link.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert size == 2 * LEAST_BUFFER_BYTES  # the kernel doubles it
