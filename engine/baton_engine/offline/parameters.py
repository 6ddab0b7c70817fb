"""Sampling parameters of the offline API: those of the protocol, and how outputs are returned.

The protocol's SamplingParams is a record on the wire between router and nodes. What a caller of
this process may ask for beside it (which outputs it gets, and how often) changes no token and is
never sent, so it is here, in a subclass that only the offline API knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from baton_protocol.errors import InvalidRequest
from baton_protocol.sampling import SamplingParams as WireParams
from baton_protocol.sampling import StructuredOutput


class RequestOutputKind(Enum):
    """What each RequestOutput of LLMEngine and AsyncLLM has; LLM returns only the last."""

    CUMULATIVE = 0  # all choices, each with all that it has so far
    DELTA = 1  # the choices that have something new, each with what is new
    FINAL_ONLY = 2  # one output, when all choices have ended


class SamplingParams(WireParams, frozen=True, kw_only=True, omit_defaults=True):
    """The protocol's SamplingParams, which says what each field does, and two fields more.

    With a `stream_interval` of N, a choice has a new output with its first token, whenever N more
    have come, and when it ends. The larger one of this and the engine's own applies.
    """

    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None


class OutputOptions(msgspec.Struct, frozen=True):
    """Which outputs a request has, and how often."""

    kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    interval: int = 1

    @classmethod
    def of(cls, params: WireParams, interval: int = 1) -> OutputOptions:
        """`interval` is the engine's own. Raises InvalidRequest."""
        if not isinstance(params, SamplingParams):
            return cls(interval=interval)
        if not isinstance(params.output_kind, RequestOutputKind):
            raise InvalidRequest(
                f"output_kind is {params.output_kind!r}; use a RequestOutputKind",
                param="output_kind",
            )
        own = params.stream_interval
        if own is not None and own < 1:
            raise InvalidRequest(
                f"stream_interval is {own}; use 1 or more", param="stream_interval"
            )
        return cls(params.output_kind, max(interval, own or 1))


def wire_params(params: WireParams) -> WireParams:
    """The record of the protocol, with the forms that vLLM accepts converted to ours: lists become
    tuples, a single stop string a tuple of one, a dict of biases a tuple of pairs, and None an
    empty tuple. Raises InvalidRequest for a value of another type or out of range."""
    values = {name: getattr(params, name) for name in WireParams.__struct_fields__}
    if isinstance(params.stop, str):
        values["stop"] = (params.stop,)
    if isinstance(params.logit_bias, Mapping):
        values["logit_bias"] = tuple(params.logit_bias.items())
    for name in ("stop", "stop_token_ids", "logit_bias", "bad_words"):
        if values[name] is None:
            values[name] = ()
    try:
        checked = msgspec.convert(values, WireParams)
    except msgspec.ValidationError as error:
        field = re.search(r"\$\.(\w+)", str(error))
        raise InvalidRequest(
            f"sampling parameters: {error}", param=field[1] if field else None
        ) from None
    checked.check()
    return checked


def StructuredOutputsParams(  # as vLLM's users write it
    *,
    json: str | Mapping[str, Any] | None = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    json_object: bool = False,
    structural_tag: str | Mapping[str, Any] | None = None,
) -> StructuredOutput:
    """The grammar that an answer must match, for SamplingParams.structured. Give exactly one
    argument. Raises InvalidRequest if it cannot be compiled."""
    from baton_text.grammars.constraints import grammar_of
    from baton_text.grammars.errors import GrammarError

    values: dict[Any, Any] = {
        "json": json,
        "regex": regex,
        "choice": choice,
        "grammar": grammar,
        "json_object": json_object or None,
        "structural_tag": structural_tag,
    }
    given = {name: value for name, value in values.items() if value is not None}
    if len(given) != 1:
        raise InvalidRequest(
            f"structured output takes one of {', '.join(values)}; {len(given)} are given"
        )
    [(kind, value)] = given.items()
    try:
        return StructuredOutput(grammar_of(kind, value))
    except GrammarError as error:
        raise InvalidRequest(str(error), param=kind) from None


GuidedDecodingParams = StructuredOutputsParams  # its older name in vLLM
