"""Prices: what a pool's tokens and the time of its nodes cost.

In: a TOML file. Out: the cost of a row of the books. A price that the file does not name is 0.

    currency = "EUR"

    [tokens]            # per 1,000 tokens
    prompt = 0.002      # those that are not cached
    cached = 0.0005
    completion = 0.006

    [node_hour]         # per hour of a node, by role
    prefill = 2.50
    decode = 2.50

    [share]             # which share of a node's price each cause costs; default 1
    lost = 0
    evicted = 0
"""

from __future__ import annotations

import msgspec

from baton_protocol.usage import TimeCause, TimeRow, TokenRow
from baton_router.errors import StartError
from baton_router.toml_file import read_toml

MS_PER_HOUR = 3_600_000.0


class _Priced(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers from 0 on."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise ValueError(f"{name} is {value}; it must be 0 or more")


class TokenPrices(_Priced, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: float = 0.0
    cached: float = 0.0
    completion: float = 0.0


class NodePrices(_Priced, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prefill: float = 0.0
    decode: float = 0.0


class CauseShares(_Priced, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prefill: float = 1.0
    decode: float = 1.0
    lost: float = 1.0
    evicted: float = 1.0
    idle: float = 1.0


class PriceList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    currency: str = ""
    tokens: TokenPrices = TokenPrices()
    node_hour: NodePrices = NodePrices()
    share: CauseShares = CauseShares()

    def of_time(self, row: TimeRow, role: str) -> float:
        hour: float = getattr(self.node_hour, role, 0.0)
        cause: TimeCause = row.cause
        return row.ms / MS_PER_HOUR * hour * float(getattr(self.share, cause))

    def of_tokens(self, row: TokenRow) -> float:
        prices, cached = self.tokens, row.cached_tokens
        return (
            (row.prompt_tokens - cached) * prices.prompt
            + cached * prices.cached
            + row.completion_tokens * prices.completion
        ) / 1000


def read_prices(path: str) -> PriceList | None:
    """Read the file; None for "". Raise StartError with one line naming the place."""
    if not path:
        return None
    try:
        return msgspec.convert(read_toml("--prices", path), PriceList)
    except msgspec.ValidationError as error:
        raise StartError(f"--prices {path}: {error}") from None
