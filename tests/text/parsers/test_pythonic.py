"""Answers that call functions in Python's syntax, as chat templates ask for them."""

from __future__ import annotations

import pytest

from baton_text.parsers.pythonic import MAX_CALL, MAX_DEPTH, OLMO3, PYTHONIC
from baton_text.parsers.registry import reader
from tests.text.parsers.reading import TOOLS, Answer, read

CALL = 'weather(city="Paris", days=2)'
PARIS = ("weather", '{"city": "Paris", "days": 2}')
NOW = ("now", "{}")


def weather(arguments: str) -> Answer:
    return {"calls": [("weather", arguments)]}


ANSWERS: dict[str, tuple[str, Answer]] = {
    "text alone": ("It is sunny.\n", {"content": "It is sunny.\n"}),
    "one call": (f"[{CALL}]", {"calls": [PARIS]}),
    "two calls": (f"[{CALL}, now()]", {"calls": [PARIS, NOW]}),
    "over lines": (f"\n[\n  {CALL} ,\n  now( )\n]\n", {"calls": [PARIS, NOW]}),
    "between markers": (f"<|python_start|>[{CALL}]<|python_end|>", {"calls": [PARIS]}),
    "text before": (f"So: [{CALL}]", {"content": f"So: [{CALL}]"}),
    "text before a marker": (
        "So:\n<|python_start|>[now()]<|python_end|>",
        {"content": "So:", "calls": [NOW]},
    ),
    "text behind": ("[now()] Done.", {"content": "Done.", "calls": [NOW]}),
    "a list": ("[1, 2]", {"content": "[1, 2]"}),
    "an empty list": ("[]", {"content": "[]"}),
    "every literal": (
        "[weather(a='x', b=-1.5, c=True, d=false, e=None, f=null, near=[1, {'k': []}], g=\"\")]",
        weather(
            '{"a": "x", "b": -1.5, "c": true, "d": false, "e": null, "f": null, '
            '"near": [1, {"k": []}], "g": ""}'
        ),
    ),
    "brackets, quotes, signs and markers in texts": (
        '[weather(city="a=1)](\'\\"<|python_end|>", days=1)]',
        weather('{"city": "a=1)](\'\\"<|python_end|>", "days": 1}'),
    ),
    "a text over lines": ("[weather(city='a\nb')]", weather('{"city": "a\\nb"}')),
    "an argument named as a keyword": (
        "[weather(from='a', class = 'b')]",
        weather('{"from": "a", "class": "b"}'),
    ),
    "an unknown escape": ("[weather(city='\\d')]", weather('{"city": "\\\\d"}')),
    "other letters": ("[weather(city='K\u00f6ln')]", weather('{"city": "K\u00f6ln"}')),
    "an unknown function": ("[rain(days=1)]", {"content": "[rain(days=1)]"}),
    "an unknown function behind a call": (
        "[now(), rain()]",
        {"content": "rain()]", "calls": [NOW]},
    ),
    "an argument without a name": ("[weather('Paris')]", {"content": "[weather('Paris')]"}),
    "an expression": ("[weather(days=1+1)]", {"content": "[weather(days=1+1)]"}),
    "a formatted text": ("[weather(city=f'{1}')]", {"content": "[weather(city=f'{1}')]"}),
    "unpacked arguments": ("[weather(**{'a': 1})]", {"content": "[weather(**{'a': 1})]"}),
    "a number that JSON has not": ("[weather(days=1e999)]", {"content": "[weather(days=1e999)]"}),
    "half a character": (
        "[weather(city='\\ud800')]",
        {"content": "[weather(city='\\ud800')]"},
    ),
    "a key that is no string": ("[weather(more={1: 2})]", {"content": "[weather(more={1: 2})]"}),
    "brackets that do not match": ("[weather(near=[1)])]", {"content": "[weather(near=[1)])]"}),
    "broken off within a name": ("[weat", {"content": "[weat"}),
    "broken off within arguments": (
        "[now(), weather(city='Pa",
        {"content": "weather(city='Pa", "calls": [NOW]},
    ),
    "broken off behind a call": ("[now(),", {"calls": [NOW]}),
}
OLMO_ANSWERS: dict[str, tuple[str, Answer]] = {
    "text alone": ("a <function", {"content": "a <function"}),
    "one call": (f"<function_calls>\n{CALL}\n</function_calls>", {"calls": [PARIS]}),
    "two calls": (f"<function_calls>{CALL}\nnow()</function_calls>", {"calls": [PARIS, NOW]}),
    "text before and behind": (
        "So:\n<function_calls>\nnow()\n</function_calls>\nDone.",
        {"content": "So:Done.", "calls": [NOW]},
    ),
    "markers in texts": (
        "<function_calls>weather(city='</function_calls>')</function_calls>",
        weather('{"city": "</function_calls>"}'),
    ),
    "an unknown function": ("<function_calls>rain()</function_calls>", {"content": "rain()"}),
    "broken off": (
        "<function_calls>\nnow()\nweather(",
        {"content": "weather(", "calls": [NOW]},
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str) -> None:
    text, answer = ANSWERS[name]
    assert read(text, PYTHONIC) == answer


@pytest.mark.parametrize("name", OLMO_ANSWERS)
def test_answers_of_olmo(name: str) -> None:
    text, answer = OLMO_ANSWERS[name]
    assert read(text, OLMO3) == answer


@pytest.mark.parametrize(
    "value",
    [
        "[" * MAX_DEPTH + "]" * MAX_DEPTH,
        "-" * 60_000 + "1",
        "1" + "+1" * 30_000,
        "9" * 5_000,
        "'" + "a" * MAX_CALL + "'",
        "not " * 15_000 + "1",
        "a." * 30_000 + "a",
        "1 if 1 else " * 5_000 + "1",
    ],
    ids=["deep", "signs", "sum", "digits", "long", "nots", "dots", "ifs"],
)
def test_arguments_beyond_the_limits_are_content(value: str) -> None:
    text = f"[weather(days={value})]"
    assert read_once(text) == {"content": text}


def read_once(text: str) -> Answer:
    """Read `text` in one push: trying all splits of a long text takes too long."""
    one = reader(TOOLS, PYTHONIC)
    pieces = [piece for at in range(0, len(text), 999) for piece in one.push(text[at : at + 999])]
    pieces += one.finish()
    assert {piece.kind for piece in pieces} == {"content"}
    return {"content": "".join(piece.text for piece in pieces)}
