"""Which parsers fit a chat template, tested with excerpts of public templates."""

from __future__ import annotations

import pytest

from baton_text.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    reasoning_parser_for,
    tool_parser_for,
)

HERMES = """{{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}"""
THINK = "{%- set content = content.split('</think>')[-1] %}{{- '<think>\\n' + reasoning }}"
V31 = "{{'<\uff5cAssistant\uff5c></think>'}}{{'<\uff5ctool\u2581calls\u2581begin\uff5c>' + "
V31 += "'<\uff5ctool\u2581call\u2581begin\uff5c>' + name + '<\uff5ctool\u2581sep\uff5c>'}}"
QWEN = "<|im_start|>assistant\\n"
# template, tool parser, reasoning parser
TEMPLATES: dict[str, tuple[str, str | None, str | None]] = {
    "no tools": ("{{ messages[0]['content'] }}", None, None),
    "Hermes, Qwen 2.5": (QWEN + HERMES, "hermes", None),
    "Qwen3": (QWEN + HERMES + THINK, "hermes", "qwen3"),
    "Qwen3-Coder": (
        QWEN + "{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}"
        "{{- '<parameter=' + args_name + '>\\n' }}",
        "qwen3_coder",
        None,
    ),
    "GLM 4.6": (
        "[gMASK]<sop><tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n"
        "<arg_value>{arg-value-1}</arg_value>" + THINK,
        "glm45",
        "glm45",
    ),
    "DeepSeek V3": (
        V31.replace("</think>", "") + "'\\n' + '```json' + '\\n'",
        "deepseek_v3",
        None,
    ),
    "DeepSeek R1": (V31 + "'\\n' + '```json' + '\\n'", "deepseek_v3", "deepseek_r1"),
    "DeepSeek V3.1": (V31, "deepseek_v31", "deepseek_r1"),
    "gpt-oss": (
        '{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}',
        "gpt_oss",
        "gpt_oss",
    ),
    "Kimi K2 Thinking": ("<|im_middle|>" + THINK, None, "kimi_k2"),
    "MiniMax M2": ("{{- ']~b]ai' ~ '\\n' }}" + THINK, None, "minimax_m2"),
    "Magistral": ("draft your thinking as [THINK]...[/THINK]", None, "mistral"),
    "Seed-OSS": ("'<seed:think>' '</seed:think>'", None, "seed_oss"),
    "Granite 3.2": (
        "after 'Here is my thought process:' and after 'Here is my response:'",
        None,
        "granite",
    ),
    "Granite 3.3": (
        "your thoughts between <think></think> and your response between <response></response>",
        None,
        "granite33",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_selects_its_parsers(name: str) -> None:
    template, tool_parser, reasoning_parser = TEMPLATES[name]
    found_tool, found_reasoning = tool_parser_for(template), reasoning_parser_for(template)
    assert (found_tool.name if found_tool else None) == tool_parser
    assert (found_reasoning.name if found_reasoning else None) == reasoning_parser


def test_the_registry_keys_are_the_parsers_names() -> None:
    assert all(parser.name == name for name, parser in TOOL_PARSERS.items())
    assert all(parser.name == name for name, parser in REASONING_PARSERS.items())
