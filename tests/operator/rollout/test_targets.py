"""targets: the number of nodes of each revision, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.rollout.role_nodes import OldNodes, RoleNodes
from baton_operator.rollout.targets import Targets, compute_targets
from baton_protocol.store import Role


def old(desired: int, revision: str = "old", **changes: Any) -> OldNodes:
    """Return `desired` old nodes that all serve; `changes` overrides fields."""
    facts: dict[str, Any] = {"alive": desired, "holding": desired, "gpus": 1}
    return OldNodes(revision=revision, desired=desired, **(facts | changes))


def nodes(role: Role, wanted: int, new: int = 0, *older: OldNodes, **changes: Any) -> RoleNodes:
    """Return a role whose `new` nodes of the current revision are ready; `changes` overrides
    fields."""
    facts: dict[str, Any] = {"desired": new, "alive": new, "ready": new, "gpus": 1}
    return RoleNodes(role=role, wanted=wanted, old=older, **(facts | changes))


def decided(
    prefill: RoleNodes, decode: RoleNodes, surge: int = 1, budget: int | None = None
) -> Targets:
    return compute_targets([prefill, decode], surge, budget)


def counts(found: Targets, revision: str = "old") -> tuple[int, int, int, int]:
    """Return the targets of new prefill, new decode, old prefill and old decode nodes."""
    kept = (found.old.get((role, revision), 0) for role in ("prefill", "decode"))
    return (found.new["prefill"], found.new["decode"], *kept)  # type: ignore[return-value]


def pool(prefill: tuple[int, int, int], decode: tuple[int, int, int], **more: Any) -> Targets:
    """Return the targets of a pool whose roles are given as (wanted, new and ready, old)."""
    (p, new_p, old_p), (d, new_d, old_d) = prefill, decode
    return decided(
        nodes("prefill", p, new_p, *((old(old_p),) if old_p else ())),
        nodes("decode", d, new_d, *((old(old_d),) if old_d else ())),
        **more,
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "surge", "expected"),
    [
        ((1, 0, 1), (1, 0, 1), 1, (1, 1, 1, 1)),
        ((1, 1, 1), (1, 1, 1), 1, (1, 1, 0, 0)),
        ((1, 1, 1), (1, 0, 1), 1, (1, 1, 1, 1)),
        ((2, 0, 2), (4, 0, 4), 1, (1, 1, 2, 4)),
        ((2, 1, 2), (4, 1, 4), 1, (1, 1, 2, 3)),
        ((2, 1, 2), (4, 1, 3), 1, (1, 2, 2, 3)),
        ((2, 1, 2), (4, 2, 3), 1, (1, 2, 1, 2)),
        ((2, 2, 1), (4, 3, 1), 1, (2, 4, 1, 1)),
        ((2, 2, 1), (4, 4, 1), 1, (2, 4, 0, 0)),
        ((2, 0, 2), (4, 0, 4), 3, (2, 3, 2, 4)),
        ((1, 0, 1), (2, 0, 5), 1, (1, 0, 1, 2)),
        ((1, 0, 1), (5, 0, 2), 1, (1, 4, 1, 2)),
        ((0, 0, 2), (2, 0, 2), 1, (0, 1, 1, 2)),
        ((0, 0, 1), (2, 2, 1), 1, (0, 2, 0, 0)),
        ((2, 0, 0), (2, 0, 2), 1, (2, 1, 0, 2)),
        ((0, 0, 2), (0, 0, 2), 1, (0, 0, 0, 0)),
        ((2, 0, 0), (3, 0, 0), 1, (2, 3, 0, 0)),
    ],
    ids=[
        "one new node of each role starts beside the old ones",
        "the old pair is removed when the new pair is ready",
        "the old pair stays while one role has no new node",
        "with several nodes, one new node of each role starts first",
        "the role that is behind sets the share of old nodes removed",
        "a new node takes a free place",
        "each role continues at its own pace",
        "one old pair stays to the end",
        "the last old pair is removed when all new nodes are ready",
        "a larger surge starts more nodes at once",
        "surplus old nodes are removed first",
        "additional nodes start at once",
        "a role scaled to 0 keeps one node while the old ones serve",
        "a role scaled to 0 has no node when the roll-out ends",
        "a role without old nodes starts its nodes at once",
        "a pool scaled to 0 removes all nodes",
        "a pool without old nodes has no roll-out",
    ],
)
def test_a_roll_out_proceeds_step_by_step(
    prefill: tuple[int, int, int],
    decode: tuple[int, int, int],
    surge: int,
    expected: tuple[int, int, int, int],
) -> None:
    assert counts(pool(prefill, decode, surge=surge)) == expected


def test_old_nodes_that_drain_or_end_count_against_the_surge() -> None:
    drains = old(3, alive=3)
    ends = old(2, alive=2, holding=2, ending=1)
    for one in (drains, ends):
        found = decided(nodes("prefill", 1, 1, old(1)), nodes("decode", 3, 1, one))
        assert found.new["decode"] == 1


def test_all_new_nodes_start_at_once_if_no_old_node_serves() -> None:
    dead = old(2, holding=0)
    found = decided(nodes("prefill", 2, 0, dead), nodes("decode", 2, 0, dead))
    assert counts(found) == (2, 2, 0, 0)
    assert not found.rolling


def test_old_nodes_that_do_not_serve_are_removed_first() -> None:
    found = decided(nodes("prefill", 1, 0, old(1)), nodes("decode", 3, 0, old(3, holding=2)))
    assert counts(found) == (1, 1, 1, 2)


def test_the_old_revision_with_the_most_nodes_stays_longest() -> None:
    found = decided(
        nodes("prefill", 2, 1, old(1, "b"), old(2, "a")),
        nodes("decode", 4, 1, old(1, "b"), old(3, "a")),
    )
    assert counts(found, "a")[2:] == (2, 3)
    assert counts(found, "b")[2:] == (0, 0)


def test_removed_old_nodes_are_not_created_again_when_new_ones_die() -> None:
    found = decided(
        nodes("prefill", 2, 0, old(1), desired=2, alive=2),
        nodes("decode", 2, 0, old(1), desired=2, alive=2),
    )
    assert counts(found) == (2, 2, 1, 1)


def test_surplus_new_nodes_are_removed_during_a_roll_out() -> None:
    found = decided(nodes("prefill", 1, 1, old(1)), nodes("decode", 2, 3, old(1)))
    assert found.new["decode"] == 2


@pytest.mark.parametrize(
    ("budget", "expected", "needed"),
    [
        (8, (1, 1, 2, 4), 8),
        (7, (0, 0, 2, 4), 8),
        (None, (1, 1, 2, 4), 0),
    ],
    ids=["enough for one of each role", "too few", "no budget"],
)
def test_a_roll_out_starts_only_with_gpus_for_one_more_node_of_each_role(
    budget: int | None, expected: tuple[int, int, int, int], needed: int
) -> None:
    found = pool((2, 0, 2), (4, 0, 4), budget=budget)
    assert counts(found) == expected
    assert found.needed_gpus == needed
    assert found.held_gpus == 6


def test_gpus_of_old_nodes_count_until_their_pods_have_ended() -> None:
    ends = old(1, ending=1)
    found = decided(nodes("prefill", 1, 1, old(1)), nodes("decode", 2, 1, ends), budget=5)
    assert found.held_gpus == 5
    assert found.new["decode"] == 1


def test_a_roll_out_to_larger_nodes_does_not_start_if_it_could_not_end() -> None:
    found = decided(
        nodes("prefill", 1, 0, old(1, gpus=0), gpus=0),
        nodes("decode", 4, 0, old(4, gpus=1), gpus=2),
        budget=8,
    )
    assert found.needed_gpus == 9
    assert counts(found) == (0, 0, 1, 4)


def test_additional_nodes_wait_for_the_end_of_a_roll_out_that_needs_their_gpus() -> None:
    found = pool((3, 2, 1), (3, 2, 1), budget=6)
    assert counts(found) == (2, 2, 0, 0)
    assert pool((3, 2, 0), (3, 2, 0), budget=6).new == {"prefill": 3, "decode": 3}


def test_a_role_grows_only_after_the_other_has_released_its_gpus() -> None:
    shrinks = nodes("prefill", 1, 3)
    assert decided(shrinks, nodes("decode", 3, 1), budget=4).new == {"prefill": 1, "decode": 1}
    ends = nodes("prefill", 1, 1, ending=1)
    assert decided(ends, nodes("decode", 3, 1), budget=4).new == {"prefill": 1, "decode": 2}


@pytest.mark.parametrize(
    ("wanted", "gpus", "budget", "expected"),
    [
        ((2, 4), (1, 1), 6, (2, 4)),
        ((2, 4), (1, 1), 5, (2, 3)),
        ((2, 4), (1, 1), 3, (1, 2)),
        ((1, 9), (1, 1), 5, (1, 4)),
        ((1, 1), (1, 1), 1, (0, 1)),
        ((1, 3), (3, 1), 3, (0, 3)),
        ((5, 5), (0, 1), 2, (5, 2)),
        ((1, 1), (1, 4), 3, (1, 0)),
    ],
    ids=[
        "all fit",
        "GPUs left by rounding are used",
        "both roles shrink in proportion",
        "one node of each role stays",
        "the only GPU goes to decode",
        "decode uses the GPUs of a prefill node that does not fit",
        "nodes without GPUs are not limited",
        "a node larger than the budget does not start",
    ],
)
def test_the_budget_limits_the_number_of_nodes(
    wanted: tuple[int, int], gpus: tuple[int, int], budget: int, expected: tuple[int, int]
) -> None:
    found = decided(
        nodes("prefill", wanted[0], gpus=gpus[0]),
        nodes("decode", wanted[1], gpus=gpus[1]),
        budget=budget,
    )
    assert (found.new["prefill"], found.new["decode"]) == expected
    assert (found.allowed["prefill"], found.allowed["decode"]) == expected
