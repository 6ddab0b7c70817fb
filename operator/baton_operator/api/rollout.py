"""What a user may say about roll-outs.

In: nothing. Out: the record.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from baton_operator.api.record import Record


class RolloutSpec(Record, frozen=True, kw_only=True):
    """How nodes of an older spec give way to new ones."""

    max_drain_seconds: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="for how long an old node's requests may go on where no new one can"
                " take them over, as their KV is not interchangeable; default: the routers'"
                " --request-timeout, 600",
            ),
        ]
        | None
    ) = None
    surge: Annotated[
        int, Meta(ge=1, description="nodes that a role may have meanwhile beyond its number")
    ] = 1
