"""The fields of POST /v1/completions."""

from __future__ import annotations

from baton_protocol.sampling import ALL_LOGPROBS, MAX_CHOICES, MOST_LOGPROBS, beams_refuse
from baton_router.openai.fields.errors import wrong
from baton_router.openai.fields.generation import LOGPROBS_LIMIT, GenerationFields
from baton_router.openai.fields.kinds import ValueKind, integer, prompts
from baton_router.openai.fields.table import TRUE, flag, needs, optional, required, rule

MAX_PROMPTS = 1024
BEST_OF_AGREES = "best_of is at least n, and is n with stream or use_beam_search"
# The lower bound depends on `echo`, so a rule checks it.
TOKENS = ValueKind(integer().read, integer(0).schema)


class CompletionFields(GenerationFields, route="/v1/completions"):
    """A completion's body."""

    prompt = required(prompts(MAX_PROMPTS), "each prompt is answered separately")
    logprobs = optional(
        integer(ALL_LOGPROBS, MOST_LOGPROBS),
        f"of each generated token and of this number of likely tokens; {LOGPROBS_LIMIT}",
        "off",
    )
    best_of = optional(
        integer(1, MAX_CHOICES),
        "generate this number of choices and answer with the `n` of the highest summed logprobs",
        "`n`",
    )
    echo = flag(False, "text and `logprobs` begin with the prompt's")

    add_special_tokens = flag(True, GenerationFields.add_special_tokens.remark)
    max_tokens = optional(TOKENS, GenerationFields.max_tokens.remark, "16")
    max_completion_tokens = optional(
        TOKENS,
        GenerationFields.max_completion_tokens.remark,
        GenerationFields.max_completion_tokens.default,
    )

    @rule("use_beam_search")
    def check_echo(self) -> None:
        if self.use_beam_search and self.echo and self.logprobs is not None:
            raise beams_refuse("echo and logprobs")

    @rule("best_of", schemas=[{"description": BEST_OF_AGREES}])
    def check_best_of(self) -> None:
        n = self.n or 1
        if self.best_of is None or self.best_of == n:
            return
        if self.best_of < n:
            raise wrong("best_of", self.best_of, f"it must be at least n, which is {n}")
        for name in ("stream", "use_beam_search"):
            if getattr(self, name):
                allowed = f"with {name} it must be n, which is {n}; leave out one of both"
                raise wrong("best_of", self.best_of, allowed)

    @rule(
        "max_completion_tokens",
        "max_tokens",
        schemas=[
            needs("max_completion_tokens", {"const": 0}, "echo", TRUE),
            needs("max_tokens", {"const": 0}, "echo", TRUE),
        ],
    )
    def check_max_tokens(self) -> None:
        """An answer without tokens shows the echo alone."""
        least = 0 if self.echo else 1
        limits = {
            "max_completion_tokens": self.max_completion_tokens,
            "max_tokens": self.max_tokens,
        }
        for name, limit in limits.items():
            if limit is not None and limit < least:
                raise wrong(name, limit, f"it must be {least} or more")
