"""What the calls of all pooling routes have in common: they generate nothing and do not stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Delta
from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.answers import Usage
from baton_router.openai.call import Json, Options, Prompt, Tasks, Truncation
from baton_router.openai.fields.generation import AS_FITS
from baton_router.pooling.fields import PoolingFields


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingCall:
    """All of a Call but its prompts and its shape."""

    options: Options
    tasks: Tasks
    truncation: Truncation | None
    add_special_tokens: bool
    priority: int
    names: Mapping[str, str]

    @property
    def sampling(self) -> Json:
        return {}

    @property
    def bad_words(self) -> tuple[str, ...]:
        return ()

    @property
    def grammar(self) -> None:
        return None

    @property
    def special_tokens_requested(self) -> bool:
        return False

    @property
    def default_max_tokens(self) -> int:
        return 0

    @property
    def continues_prompt(self) -> bool:
        return False

    @property
    def rendered(self) -> Sequence[int]:
        return ()

    def parsing(self, model: PoolModel, prompts: Sequence[Prompt]) -> None:
        return None


def shared_parts(fields: PoolingFields, prompt_name: str) -> Json:
    """Those parts of a call that follow from the fields of all routes."""
    kept = fields.truncate_prompt_tokens
    left = fields.truncation_side == "left"
    return {
        "options": Options(
            model=fields.model,
            stream=False,
            include_usage=False,
            continuous_usage=False,
            return_token_ids=False,
        ),
        "truncation": (
            None if kept is None else Truncation(None if kept == AS_FITS else kept, left)
        ),
        "add_special_tokens": fields.add_special_tokens,
        "priority": fields.priority or 0,
        "names": {"prompt": prompt_name},
    }


class WholeAnswer:
    """The part of a Shape for streams, which no pooling route has."""

    def event(self, index: int, delta: Delta) -> NoReturn:
        raise AssertionError("the answer is not streamed")

    def end(self, usage: Usage | None) -> NoReturn:
        raise AssertionError("the answer is not streamed")

    def error_event(self, error: ErrorRecord) -> NoReturn:
        raise AssertionError("the answer is not streamed")
