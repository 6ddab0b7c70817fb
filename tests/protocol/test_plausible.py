"""What a record may say, whoever sent it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from baton_protocol.plausible import LARGEST, LONGEST_TEXT, MOST_ITEMS, is_plausible
from baton_protocol.store import DataInstance, NodeLoad, RouterReport, Speeds
from tests.support.kvstore import node_report


class Nested(msgspec.Struct):
    value: Any = None


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        0.0,
        -0.0,
        int(LARGEST),
        LARGEST,
        "",
        "x" * LONGEST_TEXT,
        b"\xff",
        (),
        [0] * MOST_ITEMS,
        {"a": 1},
    ],
)
def test_what_can_be_true(value: Any) -> None:
    assert is_plausible(value)
    assert is_plausible(Nested(Nested([value])))


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        -1,
        -1e-9,
        1e300,
        int(LARGEST) + 1,
        2**64 - 1,
        "x" * (LONGEST_TEXT + 1),
        b"x" * (LONGEST_TEXT + 1),
        [0] * (MOST_ITEMS + 1),
        (0, math.nan),
        {"a": -1},
        {"x" * (LONGEST_TEXT + 1): 1},
    ],
)
def test_what_cannot(value: Any) -> None:
    assert not is_plausible(value)
    assert not is_plausible(Nested(Nested([value])))


def test_reports_as_nodes_and_routers_send_them_are_plausible() -> None:
    busy = NodeLoad(running=256, total_blocks=10**7, generated_tokens_total=10**12)
    report = msgspec.structs.replace(
        node_report(),
        speeds=Speeds(prefill_tokens_per_s=5e5, get_bytes_per_s=4e11),
        load=busy,
        instances=tuple(DataInstance(used_bytes=1 << 40) for _ in range(64)),
    )
    assert is_plausible(report)
    assert is_plausible(RouterReport(router="a", uptime_s=3e8, ttft_counts=(0, 10**9)))
