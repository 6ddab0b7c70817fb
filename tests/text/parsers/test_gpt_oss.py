"""Answers of gpt-oss, as its chat template writes them."""

from __future__ import annotations

import pytest

from baton_text.parsers.gpt_oss import GPT_OSS, GPT_OSS_REASONING
from baton_text.parsers.parser import ToolParser
from tests.text.parsers.reading import Answer, read

NEXT = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Let me think.<|end|>"
ARGUMENTS = '{"city": "Paris"}'
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
PREAMBLE = "<|channel|>commentary<|message|>I look it up.<|end|>"
FINAL = "<|channel|>final<|message|>It is sunny.<|return|>"
PARIS = ("weather", ARGUMENTS)
ANSWERS: dict[str, tuple[str, Answer]] = {
    "text without any marker": (" It is sunny.\n", {"content": " It is sunny.\n"}),
    "text alone": (FINAL, {"content": "It is sunny."}),
    "reasoning and text": (
        f"{THOUGHT}{NEXT}{FINAL}",
        {"reasoning": "Let me think.", "content": "It is sunny."},
    ),
    "reasoning and a call": (
        f"{THOUGHT}{NEXT}{CALL}",
        {"reasoning": "Let me think.", "calls": [PARIS]},
    ),
    "a preamble and a call": (
        f"{THOUGHT}{NEXT}{PREAMBLE}{NEXT}{CALL}",
        {"reasoning": "Let me think.", "content": "I look it up.", "calls": [PARIS]},
    ),
    "two calls": (f"{CALL}{NEXT}{CALL}", {"calls": [PARIS, PARIS]}),
    "the recipient before the channel": (
        f"{THOUGHT}{NEXT} to=functions.weather<|channel|>commentary json<|message|>"
        f"{ARGUMENTS}<|call|>",
        {"reasoning": "Let me think.", "calls": [PARIS]},
    ),
    "the recipient first of all": (
        f" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{ARGUMENTS}",
        {"calls": [PARIS]},
    ),
    "a call on the channel of reasoning": (
        CALL.replace("commentary", "analysis"),
        {"calls": [PARIS]},
    ),
    "a recipient without its name space": (CALL.replace("functions.", ""), {"calls": [PARIS]}),
    "a recipient that is no function": (
        CALL.replace("functions.weather", "python").replace("commentary", "analysis"),
        {"reasoning": ARGUMENTS},
    ),
    "no arguments": (
        "<|channel|>commentary to=functions.now<|message|><|call|>",
        {"calls": [("now", "{}")]},
    ),
    "markers and escapes in a text": (
        CALL.replace("Paris", '\\"<|call|>\\\\'),
        {"calls": [("weather", '{"city": "\\"<|call|>\\\\"}')]},
    ),
    "messages of one kind": (
        f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{PREAMBLE}{NEXT}{FINAL}",
        {
            "reasoning": "Let me think.\nLet me think.",
            "content": "I look it up.\nIt is sunny.",
        },
    ),
    "white space around texts": (
        "<|channel|>analysis<|message|>\n Hm.\n<|end|>\n<|start|>assistant<|channel|>final"
        "<|message|> Well.\n <|return|>",
        {"reasoning": "Hm.", "content": "Well."},
    ),
    "broken off in the reasoning": (THOUGHT[:-10], {"reasoning": "Let me thi"}),
    "broken off in a header": (
        f"{THOUGHT}{NEXT}<|channel|>comment",
        {"reasoning": "Let me think."},
    ),
    "broken off in the arguments": (
        CALL[: CALL.index("ris")],
        {"calls": [("weather", '{"city": "Pa')]},
    ),
    "broken off before the arguments": (
        CALL[: CALL.index(ARGUMENTS)],
        {"calls": [("weather", "")]},
    ),
    "arguments without an end": (
        CALL.replace("}", "") + f"{NEXT}{FINAL}",
        {"content": "It is sunny.", "calls": [("weather", ARGUMENTS[:-1])]},
    ),
    "not JSON": (CALL.replace(ARGUMENTS, "in Paris"), {"content": "weatherin Paris"}),
    "text behind the arguments": (
        CALL.replace("}", "} so"),
        {"content": "so", "calls": [PARIS]},
    ),
    "no channel": ("<|start|>assistant<|message|>Hi<|end|>", {"content": "Hi"}),
    "an unknown channel": ("<|channel|>other<|message|>Hi<|end|>", {"content": "Hi"}),
    "a header without a message": ("<|channel|>final<|end|>Hi", {"content": "Hi"}),
    "text in a header": ("<|channel|>final Hello you<|return|>", {"content": "final Hello you"}),
    "markers of nothing": ("a<|end|>b<|constrain|><|message|>c<|call|>", {"content": "abc"}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str) -> None:
    text, answer = ANSWERS[name]
    assert read(text, GPT_OSS) == answer
    assert read(text, GPT_OSS, GPT_OSS_REASONING) == answer


def test_without_a_tool_parser_reasoning_is_read_but_no_calls() -> None:
    text = f"{THOUGHT}{NEXT}{CALL}{NEXT}{FINAL}"
    answer = {"reasoning": "Let me think.", "content": f"{ARGUMENTS}\nIt is sunny."}
    assert read(text, None, GPT_OSS_REASONING, tools={}) == answer


@pytest.mark.parametrize("tool_parser", [GPT_OSS, None])
def test_an_answer_may_start_inside_a_message(tool_parser: ToolParser | None) -> None:
    text = f"think.<|end|>{NEXT}{FINAL}"
    answer = {"reasoning": "think.", "content": "It is sunny."}
    assert read(text, tool_parser, GPT_OSS_REASONING, begun=True) == answer
    assert read(" sunny.<|return|>", tool_parser, GPT_OSS_REASONING) == {"content": " sunny."}
