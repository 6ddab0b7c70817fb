"""Bodies of chats and completions, as the router reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton_protocol.errors import InvalidRequest
from baton_router.openai.chat import ChatCall
from baton_router.openai.completions import CompletionCall

Json = dict[str, Any]
Read = Callable[..., ChatCall | CompletionCall]
USER: Json = {"role": "user", "content": "Hi"}


def chat(**fields: Any) -> ChatCall:
    return ChatCall.parse(msgspec.json.encode({"messages": [USER]} | fields))


def completion(**fields: Any) -> CompletionCall:
    return CompletionCall.parse(msgspec.json.encode({"prompt": "Hi"} | fields))


def refusal(read: Callable[..., object], **fields: Any) -> InvalidRequest:
    """The error for these fields."""
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    return caught.value


both_dialects = pytest.mark.parametrize("read", [chat, completion])
