"""Two texts as one prompt, for classifiers that score pairs.

In: a model's chat template and tokenizer, and two texts. Out: the prompt. If the template has the
roles `query` and `document`, it renders the prompt; else the tokenizer joins the two texts.
"""

from __future__ import annotations

import re

from baton_text.chat import ChatTemplate
from baton_text.tokenizer import Tokenizer

ROLES = ("query", "document")
_ROLE = re.compile(r"""["'](query|document)["']""")


def renders_pairs(template: ChatTemplate) -> bool:
    """Whether the template is made for pairs."""
    return set(_ROLE.findall(template.source)) == set(ROLES)


def render_pair(template: ChatTemplate, text: str, other: str) -> str:
    """The prompt of a template that is made for pairs. Encode it with special tokens."""
    messages = [
        {"role": role, "content": content}
        for role, content in zip(ROLES, (text, other), strict=True)
    ]
    return template.render(messages, add_generation_prompt=False)


def encode_pair(
    template: ChatTemplate, tokenizer: Tokenizer, text: str, other: str
) -> tuple[list[int], int]:
    """The ids of two texts as one prompt, and the place at which the second begins, as
    Tokenizer.join_pair returns it; 0 if the template renders the prompt."""
    if renders_pairs(template):
        return tokenizer.encode(render_pair(template, text, other)), 0
    first, second = (tokenizer.encode(each, add_special_tokens=False) for each in (text, other))
    return tokenizer.join_pair(first, second)
