"""Clients' grammars in Lark: what can never match is refused by name."""

from __future__ import annotations

import pytest

from baton_text.artifacts import BYTE_VOCAB_SIZE, byte_artifacts
from baton_text.grammars.constraints import grammar_of
from baton_text.grammars.errors import GrammarError
from baton_text.grammars.grammars import Grammars
from baton_text.grammars.lark_syntax import number_of_rules
from baton_text.tokenizer import Tokenizer

GRAMMARS = Grammars(Tokenizer.from_artifacts(byte_artifacts()), BYTE_VOCAB_SIZE)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "x" (C | D)\nC: /q/ & /r/\nD: /s/ & /t/', "the terminal C matches no text"),
        ('start: "x" (C | "z")\nC: /q/ & /r/', "the terminal C matches no text"),
        ('start: "x" C?\nC: /a+/ & ~/a+/', "the terminal C matches no text"),
        ('start: "x" C\nC: B\nB: /[0-9]/ & /[a-z]/', "the terminal B matches no text"),
        (r'start: "x" | "y" /[^\s\S]/', r"the regex /[^\s\S]/ matches no text"),
        (r"start: C" "\n" r"C: /[^\w\W]+/", "the terminal C matches no text"),
        ('start: "a" start', "the rule start matches no finite text"),
        ('start: "a" | b\nb: "c" b | "d" d\nd: b+', "the rule b matches no finite text"),
        ('start: "x" (a | "z")\na: "y" a', "the rule a matches no finite text"),
        ('start: "x" a*\n?a.2: ("y" | "w") [a] a', "the rule a matches no finite text"),
    ],
)
def test_a_part_that_matches_no_text_is_refused(grammar: str, reason: str) -> None:
    with pytest.raises(GrammarError) as refused:
        GRAMMARS.check(grammar_of("grammar", grammar))
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('start: "a" start | "a"', "aaa"),
        ('start: "a" [start]', "aa"),
        ('start: "a" start?', "aa"),
        ('start: "a" start~0..1', "aa"),
        ('start: "a" start{0,1}', "aa"),
        ('start: a\na: "x" b | "y"\nb: a', "xxy"),
        ("start: C\nC: /[a-z]+/ & ~/b.*/", "ab"),
        ('start: "/" "a: b" /c: d/ // note: "\n', "/a: bc: d"),
        ('%llguidance {"no_forcing": true}\nstart: W\nW: /w+/\n%ignore / /', "w"),
        ('start: a "."\na[lazy]: /[x]+/', "x."),
        ('root ::= "a" root | "b"', "ab"),
        ('start: "%json {" | %json {"const": 1}', "%json {"),
    ],
)
def test_a_grammar_that_matches_is_accepted(grammar: str, text: str) -> None:
    matcher = GRAMMARS.matcher(grammar_of("grammar", grammar))
    assert matcher.accept(text.encode())
    assert matcher.complete


@pytest.mark.parametrize(
    "grammar", ["start: missing", 'start: "a" "\\', "start: <|none|>", 'start: ("a"', "start ="]
)
def test_an_error_of_syntax_is_one_sentence_without_the_librarys_dump(grammar: str) -> None:
    with pytest.raises(GrammarError) as refused:
        GRAMMARS.check(grammar_of("grammar", grammar))
    message = str(refused.value)
    assert message.startswith("the grammar does not compile: ")
    assert not any(raw in message for raw in ("\n", "non-verbose"))


@pytest.mark.parametrize("regex", [r"[^\s\S]", r"a[^\w\W]", "(?:[^\\d\\D])+"])
def test_a_regex_without_a_text_is_refused_in_our_words(regex: str) -> None:
    with pytest.raises(GrammarError, match=r"^no text matches it$"):
        GRAMMARS.check(grammar_of("regex", regex))


def test_rules_and_terminals_are_counted_and_texts_are_not() -> None:
    assert number_of_rules('start: a "b: c" /d: e/\n  | X // f: g\n?a[lazy]: X\nX.2: "y"\n') == 3
