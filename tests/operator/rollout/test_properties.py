"""Invariants of a roll-out, whatever becomes ready, ends or dies in any order."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

from hypothesis import assume, given
from hypothesis import strategies as st

from baton_operator.rollout.goal import OldNodes, RoleNodes, Targets, targets
from baton_protocol.store import ROLES, Role

STEPS = 2_000


@dataclass
class Nodes:
    """One Deployment: what it is asked for, and its pods by what they are."""

    desired: int = 0
    starting: int = 0
    ready: int = 0
    ending: int = 0

    @property
    def alive(self) -> int:
        return self.starting + self.ready

    @property
    def pods(self) -> int:
        return self.alive + self.ending


@dataclass
class World:
    """A pool in the middle of a roll-out. Pods come, get ready and end one at a time, by chance."""

    wanted: dict[Role, int]
    gpus: dict[Role, int]
    old_gpus: dict[Role, int]
    old: dict[tuple[Role, str], Nodes]
    surge: int
    budget: int | None
    chance: random.Random
    new: dict[Role, Nodes] = field(default_factory=lambda: {role: Nodes() for role in ROLES})

    def seen(self) -> list[RoleNodes]:
        return [
            RoleNodes(
                role=role,
                wanted=self.wanted[role],
                desired=self.new[role].desired,
                alive=self.new[role].alive,
                ending=self.new[role].ending,
                ready=self.new[role].ready,
                gpus=self.gpus[role],
                old=tuple(
                    OldNodes(
                        revision=revision,
                        desired=nodes.desired,
                        alive=nodes.alive,
                        ending=nodes.ending,
                        holding=nodes.ready,
                        gpus=self.old_gpus[role],
                    )
                    for (of, revision), nodes in self.old.items()
                    if of == role and (nodes.pods or nodes.desired)
                ),
            )
            for role in ROLES
        ]

    def decide(self) -> Targets:
        return targets(self.seen(), self.surge, self.budget)

    def obey(self, found: Targets) -> None:
        for role in ROLES:
            self.new[role].desired = found.new[role]
        for place, count in found.old.items():
            assert count <= self.old[place].desired
            self.old[place].desired = count

    def move(self) -> None:
        """One thing that may happen happens."""
        moves = [
            (nodes, what)
            for nodes in (*self.new.values(), *self.old.values())
            for what in ("make", "ready", "end", "gone")
            if self._may(nodes, what)
        ]
        if moves:
            self._do(*self.chance.choice(moves))

    def _may(self, nodes: Nodes, what: str) -> bool:
        return {
            "make": nodes.alive < nodes.desired,
            "ready": nodes.starting > 0,
            "end": nodes.alive > nodes.desired,
            "gone": nodes.ending > 0,
        }[what]

    def _do(self, nodes: Nodes, what: str) -> None:
        match what:
            case "make":
                nodes.starting += 1
            case "ready":
                nodes.starting, nodes.ready = nodes.starting - 1, nodes.ready + 1
            case "end":
                if nodes.starting:
                    nodes.starting -= 1
                else:
                    nodes.ready -= 1
                nodes.ending += 1
            case "gone":
                nodes.ending -= 1

    def held_gpus(self) -> int:
        new = sum(self.new[role].pods * self.gpus[role] for role in ROLES)
        return new + sum(nodes.pods * self.old_gpus[role] for (role, _), nodes in self.old.items())

    def serving_pairs(self, roles: set[Role]) -> int:
        """Revisions that have a ready node of each of these roles."""
        revisions = {revision for _, revision in self.old}
        kinds = [{role: self.old[role, one].ready for role in roles} for one in revisions]
        kinds.append({role: self.new[role].ready for role in roles})
        return sum(all(counts.values()) for counts in kinds)

    def is_done(self) -> bool:
        fresh = all(self.new[role].ready == self.wanted[role] for role in ROLES)
        return fresh and not any(nodes.pods or nodes.desired for nodes in self.old.values())


COUNTS = st.integers(1, 5)
GPUS = st.integers(0, 3)


@st.composite
def worlds(draw: st.DrawFn, *, revisions: int = 1, budget: bool = False) -> World:
    wanted: dict[Role, int] = {role: draw(COUNTS) for role in ROLES}
    gpus: dict[Role, int] = {role: draw(GPUS) for role in ROLES}
    old_gpus: dict[Role, int] = {role: draw(GPUS) for role in ROLES}
    names = [f"old{number}" for number in range(revisions)]
    old = {}
    for role in ROLES:
        for name in names:
            count = draw(COUNTS)
            old[role, name] = Nodes(desired=count, ready=count)
    surge = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**32))
    world = World(wanted, gpus, old_gpus, old, surge, None, random.Random(seed))
    if budget:
        # As little as the operator says that it needs, and what is held before.
        world.budget = 100_000
        found = world.decide()
        held = sum(nodes.pods * old_gpus[role] for (role, _), nodes in old.items())
        world.budget = max(1, found.needed_gpus, held) + draw(st.integers(0, 3))
    return world


@given(worlds(budget=True) | worlds(revisions=2) | worlds())
def test_it_ends_and_at_every_moment_a_pair_serves_within_surge_and_budget(world: World) -> None:
    most = {
        role: max(
            world.wanted[role] + world.surge,
            sum(nodes.pods for (of, _), nodes in world.old.items() if of == role),
        )
        for role in ROLES
    }
    for _ in range(STEPS):
        if world.is_done():
            break
        world.obey(world.decide())
        world.move()
        assert world.serving_pairs({*ROLES}) >= 1
        if world.budget is not None:
            assert world.held_gpus() <= world.budget
        for role in ROLES:
            pods = sum(nodes.pods for (of, _), nodes in world.old.items() if of == role)
            assert pods + world.new[role].pods <= most[role]
    assert world.is_done()


@given(worlds(), st.integers(0, 60))
def test_new_nodes_that_die_take_no_old_one_with_them(world: World, at: int) -> None:
    moments = []  # at which new nodes are ready beside old ones
    for _ in range(61):
        if all(any(nodes.ready for nodes in some.values()) for some in (world.old, world.new)):
            moments.append(copy.deepcopy(world))
        world.obey(world.decide())
        world.move()
    assume(moments)
    world = moments[at % len(moments)]
    before = {place: nodes.desired for place, nodes in world.old.items()}
    for nodes in world.new.values():
        nodes.starting, nodes.ready = nodes.alive, 0
    found = world.decide()
    assume(found.rolling)
    kept = {place: min(before[place], nodes.ready) for place, nodes in world.old.items()}
    for place, count in found.old.items():
        least = min(kept[place], world.wanted[place[0]])
        assert count >= least


@given(worlds(), st.integers(0, 60))
def test_the_decision_is_stable_while_nothing_changes(world: World, at: int) -> None:
    for _ in range(at):
        world.obey(world.decide())
        world.move()
    world.obey(world.decide())
    found = world.decide()
    again = world.decide()
    assert (found.new, found.old) == (again.new, again.old)
    for role in ROLES:
        assert found.new[role] == world.new[role].desired


@given(worlds(), st.integers(0, 60))
def test_a_spec_that_is_set_back_ends_with_the_nodes_that_were_there(world: World, at: int) -> None:
    for _ in range(at):
        world.obey(world.decide())
        world.move()
    old = {role: world.old[role, "old0"] for role in ROLES}
    world.old = {(role, "failed"): world.new[role] for role in ROLES}
    world.new = old
    world.gpus, world.old_gpus = world.old_gpus, world.gpus
    for _ in range(STEPS):
        if world.is_done():
            break
        world.obey(world.decide())
        world.move()
        assert world.serving_pairs({*ROLES}) >= 1
    assert world.is_done()


@given(
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.tuples(GPUS, GPUS),
    st.integers(1, 20),
)
def test_without_a_roll_out_all_that_fits_is_made_at_once(
    wanted: tuple[int, int], gpus: tuple[int, int], budget: int
) -> None:
    roles = [
        RoleNodes(role=role, wanted=count, gpus=each)
        for role, count, each in zip(ROLES, wanted, gpus, strict=True)
    ]
    free = targets(roles, 1, None)
    assert [free.new[role] for role in ROLES] == [*wanted]
    bound = targets(roles, 1, budget)
    held = sum(bound.new[one.role] * one.gpus for one in roles)
    assert held <= budget
    assert all(bound.new[one.role] <= one.wanted for one in roles)
    smallest = min((one.gpus for one in roles if bound.new[one.role] < one.wanted), default=budget)
    assert held + smallest > budget or bound.new == free.new


@given(worlds(budget=True), st.tuples(COUNTS, COUNTS), st.integers(0, 40), st.booleans())
def test_it_ends_within_the_budget_where_other_numbers_are_wanted_in_the_middle(
    world: World, later: tuple[int, int], at: int, alike: bool
) -> None:
    wanted = dict(zip(ROLES, later, strict=True))
    if alike:
        world.gpus = dict(world.old_gpus)
    pair = sum(world.gpus[role] + max(world.gpus[role], world.old_gpus[role]) for role in ROLES)
    last = sum(wanted[role] * world.gpus[role] for role in ROLES)
    world.budget = max(world.budget or 0, pair, last)
    for _ in range(at):
        world.obey(world.decide())
        world.move()
    begun = all(nodes.desired for nodes in world.new.values())
    assume(begun and world.held_gpus() <= world.budget)
    world.wanted = wanted
    for _ in range(STEPS):
        if world.is_done():
            break
        world.obey(world.decide())
        world.move()
        assert world.serving_pairs({*ROLES}) >= 1
        assert world.held_gpus() <= world.budget
    # Nodes of other sizes than the old ones may need more than that, and then it is said.
    assert world.is_done() or (not alike and world.decide().needed_gpus > world.budget)
