"""Logits processors of other packages: found by entry point or by name, made once per engine.

In: the value of --logits-processors, and the entry points of the group `baton.logits_processors`.
Out: LogitsProcessor objects (see `interface`), installed ones first. Imports no torch.

vLLM's own group of entry points is not read. Its classes keep the state of a batch between steps,
so what they change is not a function of one request's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from baton_engine.config.installed import installed_points
from baton_engine.errors import SettingsError
from baton_engine.interface import ChangeLogits, LogitsProcessor
from baton_protocol.errors import InvalidRequest

GROUP = "baton.logits_processors"


def load_processors(named: str | None, vocab_size: int) -> list[LogitsProcessor]:
    """Make all installed processors, and those that `named` lists as MODULE:CLASS, divided by
    commas. Raises SettingsError for one that cannot be made."""
    found: list[tuple[str, Any]] = []
    points = {point.value: point for point in installed_points(GROUP)}
    for point in sorted(points.values(), key=lambda point: point.name):
        try:
            found.append((f"entry point {point.name} of {GROUP}", point.load()))
        except Exception as error:
            raise SettingsError(f"entry point {point.name} of {GROUP}: {error}") from error
    for name in named.split(",") if named else ():
        found.append((f"--logits-processors {name}", _named(name.strip())))
    return [_made(what, factory, vocab_size) for what, factory in found]


def _named(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise SettingsError(f"--logits-processors {name!r} is not of the form MODULE:CLASS")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"--logits-processors {name}: {error}") from error


def _made(what: str, factory: Any, vocab_size: int) -> LogitsProcessor:
    try:
        processor: LogitsProcessor = factory(vocab_size)
    except Exception as error:
        raise SettingsError(f"{what}: {error}") from error
    if not callable(getattr(processor, "change_for", None)):
        raise SettingsError(
            f"{what} has no method change_for(args), see baton_engine.interface.LogitsProcessor"
        )
    return processor


def changes_for(
    processors: Sequence[LogitsProcessor], args: Mapping[str, Any] | None
) -> tuple[ChangeLogits, ...]:
    """What the processors change for a request with these extra_args. Raises InvalidRequest if one
    refuses them, or if none uses them."""
    if not args:
        return ()
    try:
        changes = [processor.change_for(args) for processor in processors]
    except ValueError as error:
        raise InvalidRequest(f"extra_args: {error}", param="extra_args") from None
    used = tuple(change for change in changes if change is not None)
    if not used:
        raise InvalidRequest(
            f"extra_args has {', '.join(sorted(args))}, which no logits processor of this engine"
            " uses; see --logits-processors",
            param="extra_args",
        )
    return used
