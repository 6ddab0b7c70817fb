"""Chats with tools whose node is lost mid-answer: the matrix of runs, and their execution.

In: a pool with two decode nodes and an undisturbed one, both with the model of `write_model`. Out:
nothing, or an AssertionError about one run. The answers' ids, reasoning, content and calls are
those of the undisturbed pool.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema_rs
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from baton_text.artifacts import CHAT_TEMPLATE, byte_artifacts
from baton_text.artifacts import TOKENIZER as TOKENIZER_JSON
from baton_text.chat import ChatTemplate
from baton_text.tokenizer import Tokenizer
from tests.support.clients.http import Json
from tests.support.clients.mix import CHAT
from tests.support.clients.streams import StreamedAnswer
from tests.support.engines.text_models import write_artifacts
from tests.support.faults.grammar_runs import LONG, SHORT, KilledRuns, Sampling
from tests.support.faults.structures import POINT, TOOLS
from tests.support.pools.processes import Cluster

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}{{ message.content }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{%- if enable_thinking | default(true) %}<think>{% else %}<think></think>{% endif %}{% endif %}
{#- <tool_call>{"name": "", "arguments": {}}</tool_call> #}"""
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
WORD = 24  # characters that make a prompt unique


def _artifacts() -> dict[str, bytes]:
    made = byte_artifacts()
    backend = Backend.from_buffer(made[TOKENIZER_JSON])
    backend.add_tokens([AddedToken(text, special=False) for text in MARKERS])
    return made | {TOKENIZER_JSON: backend.to_str().encode(), CHAT_TEMPLATE: TEMPLATE.encode()}


ARTIFACTS = _artifacts()
TOKENIZER = Tokenizer.from_artifacts(ARTIFACTS)
CALL_BIAS: Json = {"logit_bias": {str(TOKENIZER.added_tokens["<tool_call>"]): 10}}


def _tools(*, strict: bool) -> Json:
    return {
        "tools": [
            {
                "type": "function",
                "function": {"name": name, "parameters": dict(schema), "strict": strict},
            }
            for name, schema in TOOLS.items()
        ]
    }


OFFERED, STRICT = _tools(strict=False), _tools(strict=True)
SILENT: Json = {"chat_template_kwargs": {"enable_thinking": False}}
BUDGET: Json = {"thinking_token_budget": 8}
NAMED: Json = {"tool_choice": {"type": "function", "function": {"name": "turn"}}}
CONTENT: Json = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
}
REQUESTS: Mapping[str, Json] = {
    "required": {**OFFERED, **SILENT, "tool_choice": "required"},
    "one required": {
        **{**OFFERED, **SILENT, "tool_choice": "required", "parallel_tool_calls": False},
    },
    "named": {**OFFERED, **SILENT, **NAMED},
    "strict": {**STRICT, **SILENT, **CALL_BIAS},
    "one strict": {**STRICT, **SILENT, **CALL_BIAS, "parallel_tool_calls": False},
    "call or content": {**STRICT, **SILENT, **CONTENT, **CALL_BIAS},
    "reasoning, required": {**OFFERED, **BUDGET, "tool_choice": "required"},
    "reasoning, named": {**OFFERED, **BUDGET, **NAMED},
    "reasoning, strict": {**STRICT, **BUDGET, **CALL_BIAS},
    "reasoning, content": {**BUDGET, **CONTENT},
}
CALLS = frozenset(REQUESTS) - {"strict", "one strict", "call or content"} - {
    *("reasoning, strict", "reasoning, content"),
}  # fmt: skip


def write_model(folder: Path) -> Path:
    """Write a model whose template offers tools and opens reasoning."""
    return write_artifacts(ARTIFACTS, folder)


@dataclass(frozen=True)
class ToolRun:
    request: str
    sampling: Sampling
    n: int

    def __str__(self) -> str:
        return f"{self.request}, {self.sampling}, n {self.n}"


def all_runs() -> list[ToolRun]:
    samplings: tuple[Sampling, ...] = ("greedy", "seeded", "unseeded")
    return [ToolRun(*each) for each in product(REQUESTS, samplings, (1, 3))]


def one_run_per_request() -> list[ToolRun]:
    kinds: list[tuple[Sampling, int]] = [
        *(("greedy", 1), ("seeded", 3), ("unseeded", 1), ("seeded", 1), ("unseeded", 3)),
    ]
    return [ToolRun(name, *kinds[place % len(kinds)]) for place, name in enumerate(REQUESTS)]


class ToolRuns(KilledRuns[ToolRun]):
    path = CHAT

    def __init__(self, pool: Cluster, undisturbed: Cluster, seed: str) -> None:
        super().__init__(pool, undisturbed, seed)
        self.calls = 0
        self._template = ChatTemplate.from_artifacts(ARTIFACTS)

    def body(self, run: ToolRun, turn: int) -> Json:
        rng = random.Random(f"{run}/{turn}")
        text = "".join(chr(rng.randrange(97, 123)) for _ in range(WORD))
        return {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": SHORT if rng.random() < 0.2 else LONG,
            "n": run.n,
            "temperature": 0 if run.sampling == "greedy" else 1.0,
            **({"seed": rng.getrandbits(31)} if run.sampling == "seeded" else {}),
            **{"stream": True, "stream_options": {"include_usage": True}},
            **{"return_token_ids": True, **REQUESTS[run.request]},
        }

    def prompt_ids(self, body: Json) -> Sequence[int]:
        text = self._template.render(
            body["messages"],
            add_generation_prompt=True,
            continue_final_message=False,
            tools=_shown(body.get("tools")),
            **body.get("chat_template_kwargs", {}),
        )
        return TOKENIZER.encode(text, add_special_tokens=False)

    def check(self, run: ToolRun, answer: StreamedAnswer) -> None:
        fields = REQUESTS[run.request]
        assert len(answer.result.choices) == run.n
        for choice in answer.result.choices.values():
            assert len(set(choice.call_ids)) == len(choice.calls)
            whole = choice.finish != "length"
            complete = choice.calls if whole else choice.calls[:-1]
            for name, arguments in complete:
                jsonschema_rs.validate(dict(TOOLS[name]), json.loads(arguments))
            if "parallel_tool_calls" in fields or "named" in run.request:
                assert len(choice.calls) <= 1
            self.calls += len(complete)
            if not whole:
                self.counts.cut += 1
                continue
            self.counts.ended += 1
            if run.request in CALLS:
                assert choice.calls, f"{run}: {choice}"
                assert not choice.text
            if "response_format" in fields and not choice.calls:
                jsonschema_rs.validate(POINT, json.loads(choice.text))
            assert bool(choice.reasoning) <= ("thinking_token_budget" in fields)


def _shown(tools: Any) -> Any:
    """The tools as the router gives them to the template: without `strict`."""
    return tools and [
        {
            "type": "function",
            "function": {key: each["function"][key] for key in ("name", "parameters")},
        }
        for each in tools
    ]
