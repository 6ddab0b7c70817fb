"""The fields of POST /tokenize and /detokenize, with vLLM's names."""

from __future__ import annotations

from baton_protocol.errors import InvalidRequest
from baton_router.openai.fields.chat import BOTH_ENDS, ChatFields
from baton_router.openai.fields.errors import wrong
from baton_router.openai.fields.kinds import Schema, boolean, ids, text
from baton_router.openai.fields.table import (
    FieldTable,
    flag,
    gives,
    optional,
    required,
    rule,
    stated,
)
from baton_router.openai.fields.unserved import UnservedFields

MAX_IDS = 1 << 20
# These make the prompt from messages; a text is the prompt itself.
OF_CHATS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
ONE_OF_BOTH = "exactly one of prompt and messages must be there"
CHATS_ALONE = f"{', '.join(OF_CHATS)} need messages"
_NULL: Schema = {"type": "null"}
_ONE_OF_BOTH: Schema = {
    "anyOf": [
        {
            "required": ["prompt"],
            "properties": {"prompt": {"type": "string"}, "messages": _NULL}
            | dict.fromkeys(OF_CHATS, _NULL),
        },
        {
            "required": ["messages"],
            "properties": {"messages": {"type": "array", "items": {}}, "prompt": _NULL},
        },
    ],
    "description": f"{ONE_OF_BOTH}; {CHATS_ALONE}",
}


class TokenizeFields(FieldTable, route="/tokenize"):
    """A text or a conversation whose tokens are asked for."""

    model = optional(text(), "whose tokens; another name is a 404", "the pool's")
    prompt = optional(text(), "the text; exactly one of `prompt` and `messages` must be there")
    messages = optional(ChatFields.messages.kind, "the conversation, as a chat has it")
    add_special_tokens = optional(
        boolean(), "add the tokenizer's own tokens (BOS)", "true with `prompt`, else false"
    )
    return_token_strs = flag(False, "fills `token_strs` with the tokens as the vocabulary has them")

    add_generation_prompt = flag(True, "as in a chat; only with `messages`")
    continue_final_message = flag(False, "as in a chat, too; only with `messages`")
    chat_template_kwargs = ChatFields.chat_template_kwargs
    tools = ChatFields.tools

    chat_template = UnservedFields.chat_template
    media_io_kwargs = UnservedFields.media_io_kwargs
    mm_processor_kwargs = UnservedFields.mm_processor_kwargs

    ends_agree = stated({"description": BOTH_ENDS})

    @rule(*OF_CHATS, "prompt", "messages", schemas=[_ONE_OF_BOTH])
    def check_prompt(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest(ONE_OF_BOTH, param="prompt")
        for name in OF_CHATS:
            if self.prompt is not None and gives(self, name):
                raise wrong(name, getattr(self, name), "it needs messages; a prompt is a text")


class DetokenizeFields(FieldTable, route="/detokenize"):
    """Tokens whose text is asked for."""

    model = optional(text(), "whose tokenizer; another name is a 404", "the pool's")
    tokens = required(ids(MAX_IDS), "ids of tokens")
