"""The progress of a fetch as text, and how often it is updated."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from baton_operator.api.status import PoolStatus
from baton_operator.state.observed import Observed
from baton_operator.status.findings.model import progress_words
from tests.support.planner import observations as o
from tests.support.planner.observations import GIB, HUB, condition_of, observed, status_of, verdict

MIB = 1 << 20


def fetching(*fetches: Any, answered: bool = True) -> Observed:
    """Return an observation in which a node of each role fetches the model."""
    pods: dict[str, Any] = {
        role: o.role_pods(HUB, role, ready=False, fetch="running") for role in ("prefill", "decode")
    }
    return observed(HUB, fetches=tuple(fetches) if answered else None, **pods)


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [
        (int(3.1 * GIB), int(16.4 * GIB), "3.1 of 16.4 GiB (18 %)"),
        (0, 16 * GIB, "0.0 of 16.0 GiB (0 %)"),
        (16 * GIB - 1, 16 * GIB, "16.0 of 16.0 GiB (99 %)"),
        (16 * GIB, 16 * GIB, "16.0 of 16.0 GiB (100 %)"),
        (5 * MIB, 100 * MIB, "5.0 of 100.0 MiB (5 %)"),
        (512, 2048, "0.5 of 2.0 KiB (25 %)"),
        (1, 2, "0.0 of 0.0 KiB (50 %)"),
        (7 * MIB, 0, "7.0 MiB so far"),
        (0, 0, "the hub has not answered yet"),
    ],
)
def test_progress_is_shown_in_the_unit_of_the_total(done: int, total: int, text: str) -> None:
    assert progress_words(o.fetch(HUB, "decode", done, total)) == text


def test_the_slowest_fetch_is_shown() -> None:
    seen = fetching(
        o.fetch(HUB, "prefill", 8 * GIB, 16 * GIB), o.fetch(HUB, "decode", 4 * GIB, 16 * GIB)
    )
    status = status_of(seen, HUB)
    assert status.model.progress == "4.0 of 16.0 GiB (25 %)"
    assert condition_of(status, "ModelReady").message == "4.0 of 16.0 GiB (25 %)"
    assert verdict(status, "Ready") == ("False", "Fetching")


def test_progress_is_updated_every_five_seconds_at_most() -> None:
    def at(gib: int, seconds: float, before: PoolStatus | None) -> PoolStatus:
        seen = fetching(o.fetch(HUB, "decode", gib * GIB, 16 * GIB))
        return status_of(seen, HUB, before, after_s=seconds)

    first = at(1, 0.0, None)
    assert at(2, 4.9, first) == first
    second = at(3, 5.0, first)
    assert second.model.progress == "3.0 of 16.0 GiB (18 %)"
    assert at(4, 9.9, second) == second
    assert at(4, 10.0, second).model.progress == "4.0 of 16.0 GiB (25 %)"


def test_a_fetch_without_progress_does_not_change_the_status() -> None:
    seen = fetching(o.fetch(HUB, "decode", GIB, 16 * GIB))
    first = status_of(seen, HUB)
    assert status_of(seen, HUB, first, after_s=60) == first


def test_progress_stays_while_the_index_is_silent_and_is_removed_after_the_fetch() -> None:
    first = status_of(fetching(o.fetch(HUB, "decode", GIB, 16 * GIB)), HUB)
    silent = status_of(fetching(answered=False), HUB, first, after_s=60)
    assert silent == first
    done = status_of(observed(HUB), HUB, silent, after_s=90)
    assert (done.model.progress, done.model.progress_time) == ("", UNSET)
    assert verdict(done, "ModelReady") == ("True", "Fetched")


def test_reports_of_nodes_that_do_not_fetch_are_ignored() -> None:
    other_node = o.fetch(HUB, "decode", GIB, 16 * GIB, number=7)
    assert status_of(fetching(other_node), HUB).model.progress == ""
    assert status_of(observed(HUB, fetches=(other_node,)), HUB).model.progress == ""


def test_a_fetch_in_a_roll_out_leaves_the_model_ready_and_is_shown_by_updated() -> None:
    new: dict[str, Any] = {"ready": False, "fetch": "running"}
    seen = observed(
        HUB,
        prefill=(*o.role_pods(HUB, "prefill", **new), o.pod("prefill", 0, o.OLD)),
        decode=(*o.role_pods(HUB, "decode", **new), o.pod("decode", 0, o.OLD)),
        fetches=(o.fetch(HUB, "decode", 4 * GIB, 16 * GIB),),
    )
    status = status_of(seen, HUB)
    assert verdict(status, "ModelReady") == ("True", "Fetched")
    assert "model: 4.0 of 16.0 GiB (25 %)" in condition_of(status, "Updated").message
    assert status.model.progress == "4.0 of 16.0 GiB (25 %)"


def test_a_hub_model_has_the_name_of_its_repository() -> None:
    assert status_of(observed(HUB), HUB).model.name == "Qwen/Qwen3-0.6B"
