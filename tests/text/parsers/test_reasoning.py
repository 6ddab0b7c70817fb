"""Reasoning: where it begins and ends in each family, and how many tokens it takes."""

from __future__ import annotations

import random

import pytest

from baton_text.parsers.gpt_oss import GPT_OSS
from baton_text.parsers.hermes import HERMES
from baton_text.parsers.parser import ReasoningParser, ToolParser
from baton_text.parsers.reasoning import reasoning_tokens
from baton_text.parsers.registry import REASONING_PARSERS, reader
from baton_text.tokenizer import Tokenizer
from tests.support.engines.text_models import FAMILIES, LOSSLESS
from tests.text.parsers.reading import TOOLS, Answer, read

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NOW = ("now", "{}")
BOTH: Answer = {"reasoning": "Hm.\n\nSo.", "content": "Yes."}
# family, whether the prompt opened the reasoning, text, answer
ANSWERS: dict[str, tuple[str, bool, str, Answer]] = {
    "opened by the answer": ("qwen3", False, "<think>\nHm.\n\nSo.\n</think>\n\nYes.", BOTH),
    "opened by the prompt": ("qwen3", True, "Hm.\n\nSo.\n</think>\n\nYes.", BOTH),
    "opened by both": ("qwen3", True, "<think>Hm.\n\nSo.</think>Yes.", BOTH),
    "not opened": ("qwen3", False, "\n Yes. <think>", {"content": "\n Yes. <think>"}),
    "not closed": ("qwen3", True, "Hm.\n", {"reasoning": "Hm.\n"}),
    "empty": ("qwen3", False, "<think>\n\n</think>\n\nYes.", {"content": "Yes."}),
    "a call behind it": (
        "qwen3",
        True,
        f"Hm.</think>{CALL}",
        {"reasoning": "Hm.", "calls": [NOW]},
    ),
    "a call within it": ("qwen3", True, f"Hm.\n{CALL}", {"reasoning": "Hm.", "calls": [NOW]}),
    "a call within it, in another family": (
        "glm45",
        True,
        f"Hm. {CALL}</think>{CALL}",
        {"reasoning": f"Hm. {CALL}", "calls": [NOW]},
    ),
    "deepseek_r1": ("deepseek_r1", True, "Hm.\n\nSo.</think>Yes.", BOTH),
    "glm45": ("glm45", False, "\n<think>Hm.\n\nSo.</think>\nYes.", BOTH),
    "kimi_k2": ("kimi_k2", False, "<think>Hm.\n\nSo.</think>Yes.", BOTH),
    "minimax_m2": ("minimax_m2", True, "Hm.\n\nSo.\n</think>\n\nYes.", BOTH),
    "mistral": ("mistral", False, "[THINK]Hm.\n\nSo.[/THINK]Yes.", BOTH),
    "seed_oss": ("seed_oss", False, "<seed:think>Hm.\n\nSo.</seed:think>\nYes.", BOTH),
    "granite": (
        "granite",
        False,
        "Here is my thought process: Hm.\n\nSo.\n\nHere is my response: Yes.",
        BOTH,
    ),
    "granite33": (
        "granite33",
        False,
        "<think>Hm.\n\nSo.</think>\n<response>\nYes.\n</response>",
        BOTH,
    ),
    "granite33 without an end": (
        "granite33",
        True,
        "Hm.</think><response>Yes. </resp",
        {"reasoning": "Hm.", "content": "Yes. </resp"},
    ),
    "granite33 with a call": (
        "granite33",
        True,
        f"Hm.</think><response>Yes.</response>\n{CALL}",
        {"reasoning": "Hm.", "content": "Yes.", "calls": [NOW]},
    ),
    "granite33 without reasoning": ("granite33", False, "Yes.\n", {"content": "Yes.\n"}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str) -> None:
    family, begun, text, answer = ANSWERS[name]
    assert read(text, HERMES, REASONING_PARSERS[family], begun=begun) == answer


def test_a_call_within_reasoning_is_reasoning_if_calls_are_not_read() -> None:
    answer = {"reasoning": f"Hm.\n{CALL}", "content": "Yes."}
    assert read(f"Hm.\n{CALL}</think>Yes.", None, REASONING_PARSERS["qwen3"], begun=True) == answer


QWEN = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
DEEPSEEK = "<\uff5cUser\uff5c>Hi<\uff5cAssistant\uff5c>"
OSS = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
GRANITE = "<|start_of_role|>user<|end_of_role|>Hi<|start_of_role|>assistant<|end_of_role|>"
# family, prompt, whether an answer to it begins within reasoning
PROMPTS: dict[str, tuple[str, str, bool]] = {
    "qwen3, the model decides": ("qwen3", QWEN, False),
    "qwen3, thinking": ("qwen3", f"{QWEN}<think>\n", True),
    "qwen3, not thinking": ("qwen3", f"{QWEN}<think>\n\n</think>\n\n", False),
    "qwen3, continued in the reasoning": ("qwen3", f"{QWEN}<think>\nHm, </", True),
    "qwen3, continued in the content": ("qwen3", f"{QWEN}<think>\nHm\n</think>\n\nYes", False),
    "qwen3, content with a marker": ("qwen3", f"{QWEN}Write <think> to", False),
    "qwen3, an earlier answer": ("qwen3", f"{QWEN}<think>\nHm<|im_end|>\n{QWEN}", False),
    "unknown turns, opened": ("qwen3", "USER: <think>? MODEL: <think>\n", True),
    "unknown turns, not opened": ("qwen3", "USER: <think>? MODEL: ", False),
    "R1, nothing opened": ("deepseek_r1", DEEPSEEK, True),
    "R1, opened": ("deepseek_r1", f"{DEEPSEEK}<think>\n", True),
    "R1, behind the outputs of tools": (
        "deepseek_r1",
        f"{DEEPSEEK}calls<\uff5ctool\u2581outputs\u2581begin\uff5c>3"
        "<\uff5ctool\u2581outputs\u2581end\uff5c>",
        True,
    ),
    "R1, continued in the content": ("deepseek_r1", f"{DEEPSEEK}Yes", False),
    "R1, unknown turns": ("deepseek_r1", "Hi", True),
    "V3.1, thinking": ("deepseek_r1", f"{DEEPSEEK}<think>", True),
    "V3.1, not thinking": ("deepseek_r1", f"{DEEPSEEK}</think>", False),
    "V3.1, behind the output of a tool": (
        "deepseek_r1",
        f"{DEEPSEEK}</think>calls<\uff5ctool\u2581output\u2581begin\uff5c>3"
        "<\uff5ctool\u2581output\u2581end\uff5c>",
        False,
    ),
    "GLM 4.5": ("glm45", "[gMASK]<sop><|user|>\nHi<|assistant|>", False),
    "GLM 4.5, not thinking": ("glm45", "<|user|>\nHi<|assistant|>\n<think></think>", False),
    "GLM 4.7": ("glm45", "[gMASK]<sop><|user|>Hi<|assistant|><think>", True),
    "GLM 4.7, not thinking": ("glm45", "[gMASK]<sop><|user|>Hi<|assistant|></think>", False),
    "Kimi K2": ("kimi_k2", "<|im_assistant|>assistant<|im_middle|>", False),
    "MiniMax M2": ("minimax_m2", "]~b]user\nHi[e~[\n]~b]ai\n<think>\n", True),
    "Magistral": (
        "mistral",
        "[SYSTEM_PROMPT][THINK]so[/THINK][/SYSTEM_PROMPT][INST]Hi[/INST]",
        False,
    ),
    "Magistral, continued": ("mistral", "[INST]Hi[/INST][THINK]Hm", True),
    "Seed": ("seed_oss", "<seed:bos>user\nHi<seed:eos><seed:bos>assistant\n", False),
    "Seed, without a budget": (
        "seed_oss",
        "<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>",
        True,
    ),
    "Granite": ("granite", GRANITE, False),
    "Granite 3.3": ("granite33", GRANITE, False),
    "gpt-oss": ("gpt_oss", OSS, False),
    "gpt-oss, continued in the reasoning": (
        "gpt_oss",
        f"{OSS}<|channel|>analysis<|message|>Hm",
        True,
    ),
    "gpt-oss, continued in the content": (
        "gpt_oss",
        f"{OSS}<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final"
        "<|message|>Yes",
        False,
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_begun_tells_whether_an_answer_starts_inside_reasoning(name: str) -> None:
    family, prompt, begun = PROMPTS[name]
    assert REASONING_PARSERS[family].begun(prompt) is begun


THINK = REASONING_PARSERS["qwen3"]
OSS_PARSER = REASONING_PARSERS["gpt_oss"]
# parser, tool parser, begun, parts of an answer: (text, whether it is reasoning)
COUNTED: dict[str, tuple[ReasoningParser, ToolParser | None, bool, list[tuple[str, bool]]]] = {
    "opened by the answer": (
        THINK,
        None,
        False,
        [
            ("<think>", False),
            ("\nHm, K\u00f6ln \U0001f30d?\n", True),
            ("</think>", False),
            ("Yes", False),
        ],
    ),
    "opened by the prompt": (
        THINK,
        None,
        True,
        [("Hm.", True), ("</think>", False), ("\n\nYes", False)],
    ),
    "not closed": (THINK, None, True, [("Hm, \u65e5\u672c", True)]),
    "none": (THINK, None, False, [("Yes <think>Hm</think>", False)]),
    "empty": (THINK, None, True, [("</think>", False), ("Yes", False)]),
    "a line break alone": (
        THINK,
        None,
        False,
        [("<think>", False), ("\n", True), ("</think>", False), ("\n\nYes", False)],
    ),
    "line breaks that the prompt opened": (
        THINK,
        None,
        True,
        [("\n\n", True), ("</think>", False), ("\n", False)],
    ),
    "white space that is not closed": (THINK, None, True, [(" \n", True)]),
    "white space before a call": (THINK, HERMES, True, [("\n", True), (CALL, False)]),
    "white space around": (
        THINK,
        None,
        False,
        [("\n<think>", False), ("\n Hm \n", True), ("</think>", False), ("\nYes\n", False)],
    ),
    "gpt-oss, white space alone": (
        OSS_PARSER,
        GPT_OSS,
        False,
        [
            ("<|channel|>analysis<|message|>", False),
            ("\n", True),
            ("<|end|><|start|>assistant<|channel|>final<|message|>\nYes.<|return|>", False),
        ],
    ),
    "nothing": (THINK, None, True, []),
    "ended by a call": (THINK, HERMES, True, [("Hm.\n", True), (CALL, False)]),
    "gpt-oss, two messages": (
        OSS_PARSER,
        GPT_OSS,
        False,
        [
            ("<|channel|>analysis<|message|>", False),
            ("analysis ", True),
            ("<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>", False),
            ("<|start|>assistant<|channel|>analysis<|message|>", False),
            ("More.", True),
            ("<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>", False),
        ],
    ),
    "gpt-oss, begun": (
        OSS_PARSER,
        None,
        True,
        [("Hm", True), ("<|end|><|start|>assistant<|channel|>final<|message|>Yes", False)],
    ),
}


@pytest.mark.parametrize("tokens", LOSSLESS)
@pytest.mark.parametrize("name", COUNTED)
def test_reasoning_tokens_are_counted(name: str, tokens: str) -> None:
    parser, tool_parser, begun, parts = COUNTED[name]
    tokenizer = Tokenizer.from_artifacts(FAMILIES[tokens]())
    whole, within = "", list[int]()  # the places of the characters that are reasoning
    for text, is_reasoning in parts:
        within += range(len(whole), len(whole) + len(text)) if is_reasoning else ()
        whole += text
    ids = tokenizer.encode(whole, add_special_tokens=False)
    count = reasoning_tokens(
        reader(TOOLS, tool_parser, parser, begun=begun), tokenizer, ids, skip_special=False
    )
    assert count == sum(any(a <= at < b for at in within) for a, b in tokenizer.spans(whole))


@pytest.mark.parametrize("family", REASONING_PARSERS)
def test_reasoning_in_returns_the_ranges_of_reasoning(family: str) -> None:
    parser = REASONING_PARSERS[family]
    parts = (parser.begin, parser.end, "<|end|>", "<tool_call>", "so", "Hm", "\n", " ", "<")
    generator = random.Random(family)
    for _ in range(100):
        text = "".join(generator.choices(parts, k=generator.randint(0, 8)))
        begun = generator.random() < 0.5
        answer = read(text, HERMES, parser, begun=begun).get("reasoning", "")
        spans = reader(TOOLS, HERMES, parser, begun=begun).reasoning_in(text)
        texts = [text[a:b].strip() for a, b in spans]
        assert "\n".join(filter(None, texts)) == answer.strip()
        for start, end in spans:
            assert text[:start].endswith(parser.begin[-1]) or (begun and start == 0), text
            assert end == len(text) or not text[end].isspace(), text


def test_a_hidden_token_counts_within_reasoning_but_not_after_it() -> None:
    tokenizer = Tokenizer.from_artifacts(FAMILIES["byte-level"]())
    eos = tokenizer.eos_ids[0]
    ids = [*tokenizer.encode("Hm"), eos, *tokenizer.encode("so"), eos]
    counted = reasoning_tokens(reader({}, None, THINK, begun=True), tokenizer, ids)
    assert counted == len(ids) - 1


def test_an_unfinished_character_at_the_end_counts() -> None:
    tokenizer = Tokenizer.from_artifacts(FAMILIES["byte-level"]())
    ids = tokenizer.encode("Hm \U0001f30d")[:-1]
    counted = reasoning_tokens(reader({}, None, THINK, begun=True), tokenizer, ids)
    assert counted == len(ids)
