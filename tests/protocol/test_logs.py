"""A log line names its request and attempt, in text and in JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from baton_protocol.logs import JsonFormatter, TextFormatter


def record(*args: object, **extra: Any) -> logging.LogRecord:
    made = logging.getLogger("baton.test").makeRecord(
        "baton.test", logging.WARNING, "f.py", 7, "%s was lost", args, None, extra=extra
    )
    made.created = 1700000000.1234
    return made


def test_a_json_line_has_the_message_and_all_extra_fields() -> None:
    line = JsonFormatter().format(record("decode-0", request="r1", attempt=2, cause="link"))
    assert json.loads(line) == {
        "time": 1700000000.123,
        "level": "warning",
        "logger": "baton.test",
        "message": "decode-0 was lost",
        "request": "r1",
        "attempt": 2,
        "cause": "link",
    }


def test_tracebacks_and_values_unknown_to_json_stay_on_one_json_line() -> None:
    made = record("x", node={1})
    try:
        raise ValueError("why")
    except ValueError:
        made.exc_info = sys.exc_info()
    line = JsonFormatter().format(made)
    assert "\n" not in line
    assert json.loads(line)["traceback"].endswith("ValueError: why")
    assert json.loads(line)["node"] == "{1}"


def test_a_text_line_ends_with_request_and_attempt() -> None:
    line = TextFormatter().format(record("decode-0", request="r1", attempt=2, cause="link"))
    assert line.endswith(" WARNING baton.test: decode-0 was lost request=r1 attempt=2")


def test_a_text_line_without_a_request_is_unchanged() -> None:
    assert TextFormatter().format(record("decode-0", node="n")).endswith(": decode-0 was lost")


def test_the_traceback_of_a_text_line_follows_the_request() -> None:
    made = record("x", request="r1", attempt=1)
    try:
        raise ValueError("why")
    except ValueError:
        made.exc_info = sys.exc_info()
    first, *_, last = TextFormatter().format(made).splitlines()
    assert first.endswith("request=r1 attempt=1")
    assert last == "ValueError: why"
