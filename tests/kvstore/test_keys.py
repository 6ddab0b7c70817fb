from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from baton_kvstore.keys import (
    LONGEST_PIN_S,
    chunk_key,
    inbox_key,
    marker_key,
    node_key,
    nodes_key,
    pin_key,
    pins_key,
    ttl_ms,
)
from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId

FP = Fingerprint("f" * 32)
NAME = BlockHash(bytes(range(16)))


def test_keys_have_the_documented_format() -> None:
    assert chunk_key(FP, NAME) == f"kv1:{FP}:{{{NAME.hex()}}}:s0".encode()
    assert chunk_key(FP, NAME, 3).endswith(b":s3")
    assert marker_key(FP, NAME) == f"kv1:{FP}:{{i}}:{NAME.hex()}".encode()
    assert inbox_key("p", NodeId("n"), Epoch("e")) == b"h1:p:n:e"
    assert nodes_key("p") == b"n1:p"
    assert node_key("p", NodeId("n")) == b"n1:p:n"
    assert pins_key("p") == b"p1:p"
    assert pin_key("p", "a" * 16) == b"p1:p:" + b"a" * 16


@given(depth=st.integers(0, 10_000), more=st.integers(1, 1000))
def test_lifetimes_fall_with_depth_and_stay_between_half_the_base_and_the_base(
    depth: int, more: int
) -> None:
    base_s = 3600.0
    assert ttl_ms(0, base_s) == 3_600_000
    assert 1_800_000 <= ttl_ms(depth + more, base_s) <= ttl_ms(depth, base_s) <= 3_600_000
    assert depth > 5000 or ttl_ms(depth + more, base_s) < ttl_ms(depth, base_s)


def test_a_lifetime_is_never_zero() -> None:
    assert ttl_ms(10**9, 0.0) == 1


def test_a_chunk_of_a_pinned_prefix_lives_as_long_as_the_pin_if_that_is_longer() -> None:
    now = int(time.time())
    assert ttl_ms(64, 1000.0, kept_until=now + 600) == ttl_ms(64, 1000.0) == 750_000
    assert 7_190_000 < ttl_ms(64, 1000.0, kept_until=now + 7200) <= 7_200_000
    assert ttl_ms(64, 1000.0, kept_until=now - 9) == 750_000
    assert ttl_ms(0, kept_until=2**53) == LONGEST_PIN_S * 1000
