"""The fields of POST /v1/chat/completions."""

from __future__ import annotations

from baton_protocol.errors import InvalidRequest
from baton_protocol.sampling import ALL_LOGPROBS, MAX_CHOICES, MOST_LOGPROBS
from baton_router.openai.fields.errors import wrong
from baton_router.openai.fields.generation import LOGPROBS_LIMIT, GenerationFields
from baton_router.openai.fields.kinds import Json, choice, integer, mapping, objects
from baton_router.openai.fields.table import TRUE, flag, gives, needs, optional, required, rule
from baton_router.openai.messages import MESSAGES
from baton_router.openai.reasoning import EFFORTS, MAX_BUDGET, NO_BUDGET
from baton_router.openai.tools import TOOL_CHOICE, TOOLS, TOOLS_AGREE
from baton_text.chat import RESERVED

MAX_DOCUMENTS = 1024
BOTH_ENDS = "continue_final_message and add_generation_prompt are not both true"
DOCUMENTS_TWICE = "documents do not stand in chat_template_kwargs too"
BEST_OF_REPEATS = "best_of is what n is"
_NEEDS_TOOLS = "it needs tools: send some, or leave this field out"
_TEMPLATE_NAMES = {"not": {"enum": list(RESERVED)}}


def check_template_names(kwargs: Json) -> None:
    """Refuse values that a client does not set in `chat_template_kwargs`."""
    for name in RESERVED:
        if name in kwargs:
            raise InvalidRequest(
                f"chat_template_kwargs holds {name!r}, which is no value of a template; a"
                " client sets it by a field of its own, or not at all",
                param="chat_template_kwargs",
            )


class ChatFields(GenerationFields, route="/v1/chat/completions"):
    """A chat's body."""

    messages = required(MESSAGES, "the conversation")
    best_of = optional(integer(1, MAX_CHOICES), "may only repeat `n`", "`n`")
    chat_template_kwargs = optional(
        mapping(propertyNames=_TEMPLATE_NAMES),
        "variables for the chat template, which may ignore them",
    )
    documents = optional(
        objects(MAX_DOCUMENTS), "passed to the model's template, which may ignore them"
    )
    add_generation_prompt = flag(True, "end the prompt where the assistant's message begins")
    continue_final_message = flag(
        False,
        "end the prompt where the last message ends; the answer continues it"
        " ([below](#continuing-a-message))",
    )

    tools = optional(TOOLS, "functions that the model may call ([tools](tools.md))")
    tool_choice = optional(
        TOOL_CHOICE,
        "`none`, `auto`, `required`, or the function to call; only with `tools`",
        "`auto` with `tools`",
    )
    parallel_tool_calls = flag(True, "false: at most one call; only with `tools`")
    reasoning_effort = optional(
        choice(*EFFORTS),
        "passed to the model's template, which may ignore it; `none` also sets"
        " `enable_thinking` to false there ([reasoning](tools.md#reasoning))",
    )
    include_reasoning = flag(True, "false: reasoning is left out of the answer")
    thinking_token_budget = optional(
        integer(NO_BUDGET, MAX_BUDGET),
        "maximum tokens of reasoning, -1 for no bound; only for models whose reasoning the router"
        " can separate",
        "no bound",
    )

    logprobs = flag(False, "of each generated token")
    top_logprobs = optional(
        integer(ALL_LOGPROBS, MOST_LOGPROBS),
        f"number of likely tokens, with `logprobs`; {LOGPROBS_LIMIT}",
        "0",
    )
    echo = flag(False, "the text begins with the last message's text if that is the assistant's")

    @rule("best_of", schemas=[{"description": BEST_OF_REPEATS}])
    def check_best_of(self) -> None:
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            allowed = f"a chat has n answers only, which is {n}; leave it out"
            raise wrong("best_of", self.best_of, allowed)

    @rule(
        "top_logprobs",
        schemas=[needs("top_logprobs", {"type": "integer", "not": {"const": 0}}, "logprobs", TRUE)],
    )
    def check_top_logprobs(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", self.top_logprobs, "it needs logprobs to be true")

    @property
    def begins_answer(self) -> bool:
        """Whether the prompt ends where a new message of the assistant begins."""
        if gives(self, "add_generation_prompt"):
            return self.add_generation_prompt
        return not self.continue_final_message

    @rule("continue_final_message", schemas=[{"description": BOTH_ENDS}])
    def check_end_of_prompt(self) -> None:
        if self.continue_final_message and self.begins_answer:
            raise wrong(
                "continue_final_message",
                True,
                "no new message begins then: leave out add_generation_prompt, or say false",
            )

    @property
    def template_kwargs(self) -> Json:
        """Additional values for the template, including documents."""
        kwargs = self.chat_template_kwargs or {}
        return kwargs if self.documents is None else kwargs | {"documents": self.documents}

    @rule("documents", "chat_template_kwargs", schemas=[{"description": DOCUMENTS_TWICE}])
    def check_template_kwargs(self) -> None:
        kwargs = self.chat_template_kwargs or {}
        if self.documents is not None and "documents" in kwargs:
            raise InvalidRequest(
                "documents stand in chat_template_kwargs too; leave out one of both",
                param="documents",
            )
        check_template_names(kwargs)

    @rule("tools", "tool_choice", "parallel_tool_calls", schemas=[{"description": TOOLS_AGREE}])
    def check_tools(self) -> None:
        tools, choice = self.tools, self.tool_choice
        if tools is None:
            if choice is not None:
                raise wrong("tool_choice", choice.given, _NEEDS_TOOLS)
            if gives(self, "parallel_tool_calls"):
                raise wrong("parallel_tool_calls", self.parallel_tool_calls, _NEEDS_TOOLS)
        elif choice is not None and choice.named not in (None, *tools.functions):
            names = ", ".join(tools.functions)
            allowed = f"tools has no such function; its functions are {names}"
            raise wrong("tool_choice", choice.named, allowed)
