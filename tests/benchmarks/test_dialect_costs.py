"""The table and the goals of `router.overhead --dialects`, and the requests that it sends."""

from __future__ import annotations

import json

import pytest

from baton_router.http.dialects import DIALECTS
from benchmarks.router.overhead import options_of
from benchmarks.support.router.dialect_costs import (
    FORMS,
    KEPT,
    Cost,
    dialect_goals,
    dialect_table,
)
from benchmarks.support.router.load_generator import CHAT, IDS, TEXT, Form, Question

COSTS = {
    "responses": [Cost(2.2, 2.0), Cost(4.0, 4.0), Cost(3.6, 3.0)],
    "messages": [Cost(2.4, 2.0), Cost(4.8, 4.0), Cost(3.0, 3.0)],
    KEPT: [Cost(2.1, 2.0), Cost(4.2, 4.0), Cost(3.0, 3.0)],
}


def test_dialects_are_compared_with_chat_pass_by_pass() -> None:
    _, responses, *_ = dialect_table(COSTS)
    row = ["responses", "3.60", "[2.20-4.00]", "3.00", "[2.00-4.00]", "1.10"]
    assert responses.split() == row
    assert dialect_goals(COSTS) == [
        ("CPU of responses 1.10x chat's (goal 1.15x)", True),
        ("CPU of messages 1.20x chat's (goal 1.15x)", False),
        ("CPU of chat, kept 1.05x chat's (goal 1.05x)", True),
    ]


@pytest.mark.parametrize("form", [TEXT, IDS, CHAT, *FORMS.values()])
def test_each_form_is_a_stream_of_its_dialect(form: Form) -> None:
    fields = form.fields(Question("Hello", (1, 2), 7)) | {"model": "m", "stream": True}
    call = DIALECTS[form.route].parse(bytearray(json.dumps(fields).encode()))
    assert call.options.stream


def test_dialects_meet_no_rivals() -> None:
    options = options_of(["--dialects"])
    assert (options.dialects, options.passes, options.rivals) == (True, 3, [])
    assert options_of(["--dialects", "--tokens", "256"]).tokens == 256
