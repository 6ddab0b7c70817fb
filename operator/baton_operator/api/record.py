"""The base of all parts of a spec."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from baton_operator.api.cel import CelRule


class Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of the spec. Each subclass repeats `frozen` for mypy. Unknown fields are ignored: the
    CRD may be newer than the operator, and the API server already rejects typos. `whole`: one
    server-side applier owns all fields of the record, so two appliers cannot mix theirs."""

    rules: ClassVar[tuple[CelRule, ...]] = ()
    whole: ClassVar[bool] = False
