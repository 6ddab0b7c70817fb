"""Which one-token rows are computed together: those with a common prefix or of similar length.

Prefix caching gives requests the same blocks for the same first tokens. The keys of a system prompt
are read once per layer and multiplied with the queries of all rows. The bits stay the same, because
a row of a product does not depend on the other rows (see `batched_products`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton_engine.attention.exact.splits import Splits
from baton_engine.attention.interface import TableRow

# Rows of up to this number of splits may share a group.
SHORT_SPLITS = 4


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows, ascending indexes, whose first `shared` splits have the same blocks. `own` is the
    largest number of further splits of one of them."""

    members: Sequence[int]
    shared: int
    own: int


def group_by_length(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Divide rows, given by their numbers of splits, into groups to pad to the longest: indexes of
    rows with similar sizes, at most `most` splits with padding. Short rows share a group whatever
    their sizes, because padding costs less than another call."""
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    group: list[int] = []
    for index in order:
        longest = sizes[group[0]] if group else 0
        uneven = not _similar(longest, sizes[index])
        if group and (uneven or longest * (len(group) + 1) > most):
            yield sorted(group)
            group = []
        group.append(index)
    if group:
        yield sorted(group)


def group_by_size(groups: Sequence[PrefixGroup], most: int) -> Iterator[list[PrefixGroup]]:
    """Divide groups into those that one call computes, whose rows are padded to the largest numbers
    of shared splits and of own ones: groups of similar sizes, at most `most` splits with padding.
    Sequences with drafts are such groups."""
    together: list[PrefixGroup] = []
    for group in sorted(groups, key=lambda each: (-each.shared, -each.own)):
        several = [*together, group]
        own = max(each.own for each in several)
        count = (several[0].shared + own) * sum(len(each.members) for each in several)
        alike = _similar(several[0].shared, group.shared) and _similar(
            own, min(each.own for each in several)
        )
        if together and not (alike and count <= most):
            yield together
            several = [group]
        together = several
    if together:
        yield together


def _similar(longest: int, size: int) -> bool:
    return longest <= max(2 * size, SHORT_SPLITS)


def group_by_prefix(rows: Sequence[TableRow], splits: Splits) -> list[tuple[list[int], int]]:
    """Divide rows into groups to compute together: indexes of rows, and how many leading splits
    have the same blocks in all of them. Only splits before the row's new token are shared, so each
    row has at least one split of its own. Rows that share nothing form one group."""
    if not rows:
        return []
    if splits.window is not None:
        return [(list(range(len(rows))), 0)]
    counts = [int(splits.of(row.start)) for row in rows]
    _, groups = _best_grouping(rows, splits.blocks, counts, list(range(len(rows))), 0)
    taken = {index for members, _ in groups for index in members}
    alone = [index for index in range(len(rows)) if index not in taken]
    return [(alone, 0), *groups] if alone else groups


def _best_grouping(
    rows: Sequence[TableRow], blocks: int, counts: Sequence[int], members: list[int], same: int
) -> tuple[int, list[tuple[list[int], int]]]:
    """The grouping of `members` that saves most, and its saving in splits of one row. Their first
    `same` splits are the same. Either all form one group with their common prefix, or they split
    by the next split into groups with longer prefixes."""
    if len(members) < 2:
        return 0, []

    def split_of(index: int, split: int) -> bytes:
        return rows[index].blocks[split * blocks : (split + 1) * blocks].tobytes()

    common, most = same, min(counts[index] for index in members)
    while common < most and len({split_of(index, common) for index in members}) == 1:
        common += 1
    apart: dict[bytes, list[int]] = {}
    for index in members:
        if counts[index] > common:
            apart.setdefault(split_of(index, common), []).append(index)
    parts = [_best_grouping(rows, blocks, counts, part, common + 1) for part in apart.values()]
    saved_apart, whole = sum(saved for saved, _ in parts), (len(members) - 1) * common
    if saved_apart > whole:
        return saved_apart, [group for _, groups in parts for group in groups]
    return (whole, [(members, common)]) if common else (0, [])
