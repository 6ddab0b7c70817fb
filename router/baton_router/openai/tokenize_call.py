"""The body of POST /tokenize, read as the chat or the completion that would have this prompt.

In: a JSON body. Out: a call whose prompt is to be tokenized, so that its ids are those that a node
would get.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_protocol.errors import InvalidRequest
from baton_router.openai.call import Call, Json
from baton_router.openai.chat import ChatCall
from baton_router.openai.completions import CompletionCall
from baton_router.openai.fields.chat import ChatFields
from baton_router.openai.fields.completions import CompletionFields
from baton_router.openai.fields.table import obeyed_members, read_fields
from baton_router.openai.fields.tokens import ONE_OF_BOTH, TokenizeFields
from baton_router.openai.json_body import decode_object


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """`token_strs`: the client asks for the tokens' names too."""

    call: Call
    token_strs: bool

    @classmethod
    def parse(cls, data: bytes | bytearray) -> TokenizeCall:
        """Raise InvalidRequest naming the first wrong field; MalformedBody."""
        return cls.from_body(decode_object(data))

    @classmethod
    def from_body(cls, body: Json) -> TokenizeCall:
        """Raise InvalidRequest naming the first wrong field."""
        fields = read_fields(TokenizeFields, body)
        if fields.prompt is None and fields.messages is None:
            raise InvalidRequest(ONE_OF_BOTH, param="prompt")
        table = ChatFields if fields.prompt is None else CompletionFields
        asked = obeyed_members(TokenizeFields, body)
        shared = {name: value for name, value in asked.items() if name in table.FIELDS}
        call = ChatCall if fields.prompt is None else CompletionCall
        return cls(call.from_body(shared), fields.return_token_strs)
