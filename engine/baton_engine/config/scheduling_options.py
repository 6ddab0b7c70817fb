"""The options of a scheduler, apart from the sizes of a step. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from baton_engine.errors import SettingsError

SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """The fields of EngineConfig with these names, which has their help texts and bounds."""

    scheduling_policy: SchedulingPolicy = "fcfs"
    long_prefill_token_threshold: int = 0  # 0: no limit
    max_num_partial_prefills: int | None = None  # None: no limit
    max_long_partial_prefills: int | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    max_pinned_fraction: float = 0.25
    scheduler_cls: str | None = None  # "module:Class"

    @classmethod
    def of(cls, config: Any) -> Self:
        """The options in a record that has all of these fields."""
        return cls(**{each.name: getattr(config, each.name) for each in fields(cls)})

    def check(self) -> None:
        """Raise SettingsError for options that contradict each other."""
        threshold, longest = self.long_prefill_token_threshold, self.max_long_partial_prefills
        if longest is not None and not threshold:
            raise SettingsError(
                f"--max-long-partial-prefills {longest} needs --long-prefill-token-threshold, which"
                " says when a prompt is long"
            )
        most = self.max_num_partial_prefills
        if longest is not None and most is not None and longest > most:
            raise SettingsError(
                f"--max-long-partial-prefills {longest} is more than --max-num-partial-prefills"
                f" {most}, which counts long prompts too; lower it"
            )
        cuts = {
            "--long-prefill-token-threshold": threshold,
            "--max-num-partial-prefills": most,
        }
        given = [f"{flag} {value}" for flag, value in cuts.items() if value]
        if given and not self.enable_chunked_prefill:
            raise SettingsError(
                f"{given[0]} cuts prompts, and --no-enable-chunked-prefill forbids it; leave out"
                " one of the two"
            )


DEFAULT_SCHEDULING = SchedulingOptions()
