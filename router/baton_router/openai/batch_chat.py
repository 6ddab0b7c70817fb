"""POST /v1/chat/completions/batch: several conversations with the same parameters in one call.

In: a chat's body whose `messages` is a list of conversations. Out: one `chat.completion` whose
choices are the answers, in the order of the conversations. Each is a request of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton_protocol.errors import InvalidRequest
from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.answer_parsing import AnswerParsing
from baton_router.openai.answers import ChatCompletion, CommonFields, Usage
from baton_router.openai.call import Json, Prompt, PromptIds
from baton_router.openai.chat import ChatCall, ChatShape
from baton_router.openai.choice_output import ChoiceOutput
from baton_router.openai.dialect import Dialect
from baton_router.openai.fields.batch_chat import BatchChatFields
from baton_router.openai.fields.table import read_fields
from baton_router.openai.json_body import decode_object
from baton_text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChatCall(ChatCall):
    """The call about the first conversation, with `others` about the rest."""

    others: Sequence[ChatCall]

    @classmethod
    def parse(cls, data: bytes | bytearray) -> BatchChatCall:
        """Raise InvalidRequest naming the first wrong field; MalformedBody."""
        return cls.from_body(decode_object(data))

    @classmethod
    def from_body(cls, body: Json) -> BatchChatCall:
        """Raise InvalidRequest naming the first wrong field."""
        fields = read_fields(BatchChatFields, body)
        first, *rest = fields.messages
        others = [ChatCall.from_fields(fields, messages) for messages in rest]
        return cls.from_fields(fields, first, others=others)

    @property
    def rendered(self) -> Sequence[int]:
        own: Sequence[int] = ChatCall.rendered.__get__(self)
        return (*own, *(size for other in self.others for size in other.rendered))

    def forget_prompts(self) -> None:
        ChatCall.forget_prompts(self)
        for other in self.others:
            other.forget_prompts()

    def prompts(self, model: PoolModel) -> list[Prompt]:
        first = ChatCall.prompts(self, model)
        return first + [prompt for other in self.others for prompt in other.prompts(model)]

    def parsing(self, model: PoolModel, prompts: Sequence[Prompt]) -> AnswerParsing | None:
        """That of every conversation. Raise InvalidRequest if one needs another than the first, as
        one of both continues reasoning, or text after it."""
        parsing = ChatCall.parsing(self, model, prompts[:1])
        for place, (other, prompt) in enumerate(zip(self.others, prompts[1:], strict=True), 1):
            if other.parsing(model, [prompt]) != parsing:
                raise InvalidRequest(
                    f"the answers of messages[0] and messages[{place}] do not begin alike: only "
                    "one of them continues reasoning, or text after it; send them apart",
                    param="messages",
                )
        return parsing

    def shape(
        self,
        common: CommonFields,
        prompts: PromptIds,
        tokenizer: Tokenizer,
        parsing: AnswerParsing | None = None,
    ) -> BatchChatShape:
        first = ChatCall.shape(self, common, prompts[:1], tokenizer, parsing)
        pairs = zip(self.others, prompts[1:], strict=True)
        rest = (other.shape(common, [ids], tokenizer, parsing) for other, ids in pairs)
        return BatchChatShape(self, common, [first, *rest])


class BatchChatShape(ChatShape):
    """The JSON of the answers together. No stream has them."""

    def __init__(
        self, call: BatchChatCall, common: CommonFields, chats: Sequence[ChatShape]
    ) -> None:
        super().__init__(call, common, ())
        self._chats = chats

    def answer(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes:
        pairs = enumerate(zip(self._chats, choices, strict=True))
        answer = ChatCompletion(
            **self._common.shared(),
            object="chat.completion",
            choices=[chat.choice(index, choice) for index, (chat, choice) in pairs],
            usage=usage,
            prompt_token_ids=None,
            prompt_logprobs=None,
        )
        return msgspec.json.encode(answer)


BATCH_CHAT = Dialect(
    route=BatchChatFields.ROUTE,
    endpoint="batch_chat",
    operation="chat",
    prefix="chatcmpl-",
    parse=BatchChatCall.parse,
)
