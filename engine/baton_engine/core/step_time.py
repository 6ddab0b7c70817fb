"""Divides the time of a step among the requests whose tokens it computed.

In: a step that was read, and the seconds of each token. Out: seconds in the accounts of its
requests and of their tenants, by cause (see `baton_protocol.usage`). A row of a request that has
ended meanwhile counts like any other: its time was spent.
"""

from __future__ import annotations

from baton_engine.core.in_flight import InFlightStep


def book_step(step: InFlightStep, each: float) -> None:
    """Book `each` seconds for each token. Rows of requests without an account are booked nowhere.
    Most rows decode, so these take the shortest way: 0.1 us."""
    for piece, row in zip(step.pieces, step.rows, strict=True):
        sequence = piece.sequence
        account = sequence.state.account
        if account is None:
            continue
        if row.start >= sequence.first_new:
            share = each * piece.count
            account.decode += share
            account.tenant.decode += share
            continue
        start, end = row.start, row.start + piece.count
        evicted = max(0, min(end, sequence.reached) - start)
        lost = max(0, min(end, sequence.lost_until) - start - evicted)
        prefill = max(0, min(end, sequence.state.prompt_len) - start - evicted - lost)
        decode = piece.count - evicted - lost - prefill
        for one in (account, account.tenant):
            one.evicted += evicted * each
            one.lost += lost * each
            one.prefill += prefill * each
            one.decode += decode * each
