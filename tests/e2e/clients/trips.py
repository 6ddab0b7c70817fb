"""The prompt and the type that the tests request. Each client makes its own schema of the type."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

QUESTION = "Plan a journey from Paris to Rome by train, with one stop."
# Enough tokens for each value of the type, also if each byte is a token.
LIMITS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 300, "seed": 3}


class Leg(BaseModel):
    """A part of a journey."""

    model_config = ConfigDict(extra="forbid")

    town: Annotated[str, Field(max_length=12)]
    hours: Annotated[int, Field(ge=1, le=48)]


class Trip(BaseModel):
    """A journey."""

    model_config = ConfigDict(extra="forbid")

    title: Annotated[str, Field(max_length=16)]
    means: Literal["rail", "road", "air"]
    both_ways: bool
    note: Annotated[str | None, Field(max_length=8)]
    legs: Annotated[list[Leg], Field(min_length=1, max_length=2)]
