"""One frozen record declares a command's flags; argparse flags, variables and argv follow from it.

In: a dataclass whose options come from `option()` of baton_protocol. Out: flags in an argparse
parser; a record merged from the command line and the environment; and a record turned back into
argv and variables, with which `baton up` starts its children. The field `max_queued` becomes the
flag `--max-queued`, unless the option names another, and the variable BATON_MAX_QUEUED. A field
that holds a record contributes that record's flags: `layers` of the record in `sim` becomes
`--sim-layers`.
"""

from __future__ import annotations

import argparse
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from typing import Any, Literal, TypeVar, Union

from baton_cli.errors import UsageError
from baton_cli.options.devices import DEVICE_METAVAR, parse_device
from baton_cli.options.environment import PREFIX
from baton_cli.options.sizes import parse_size, show_size
from baton_engine.config.engine_config import Device
from baton_protocol.errors import exact
from baton_protocol.options import ByteSize, Option, option_of

R = TypeVar("R")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_flags: dict[type, tuple[Flag, ...]] = {}  # of each record that was read; they never change


@dataclass(frozen=True, kw_only=True)
class Flag(Option):
    """One flag as read from a record's field."""

    name: str  # as a word with underscores, with the prefix of a nested record
    field: str  # the field of its record
    hint: Any
    default: Any
    title: str  # the heading of its group in --help
    record: str = ""  # for a flag of a nested record: the field that holds this record

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def has_variable(self) -> bool:
        return not (self.hidden or self.positional)

    @property
    def choices(self) -> tuple[str, ...]:
        return typing.get_args(self.hint) if typing.get_origin(self.hint) is Literal else ()

    def parse(self, text: str) -> Any:
        """Return the typed value, or raise ValueError with the problem."""
        value = _parse(self.hint, text)
        if self.least is not None and value < self.least:
            raise ValueError(f"{text} is too small; at least {exact(self.least)}")
        if self.most is not None and value > self.most:
            raise ValueError(f"{text} is too large; at most {exact(self.most)}")
        return value

    def value_in(self, options: Any) -> Any:
        return getattr(getattr(options, self.record) if self.record else options, self.field)

    def show(self, value: Any) -> str:
        """The text that parse() reads back as `value`."""
        if self.hint == ByteSize:
            return show_size(value)
        if isinstance(value, float):
            return f"{value:.12g}"
        if isinstance(value, tuple):
            return ",".join(value)
        return str(value)


def flags_of(record: type) -> tuple[Flag, ...]:
    """Return the record's flags in the order of dataclasses.fields(), nested records expanded.
    Fields that are no options are left out."""
    if record not in _flags:
        _flags[record] = tuple(_read_flags(record))
    return _flags[record]


def _read_flags(record: type) -> list[Flag]:
    hints = typing.get_type_hints(record, include_extras=True)
    flags: list[Flag] = []
    for item in fields(record):
        hint = _without_none(hints[item.name])
        if is_dataclass(hint):
            flags += [
                replace(inner, name=f"{item.name}_{inner.name}", record=item.name)
                for inner in flags_of(typing.cast(type, hint))
            ]
        elif declared := option_of(item):
            flags.append(
                Flag(
                    **vars(declared),
                    name=(declared.flag or item.name).removeprefix("--").replace("-", "_"),
                    field=item.name,
                    hint=hint,
                    default=item.default,
                    title=_title(record, item.name),
                )
            )
    return flags


def _title(record: type, name: str) -> str:
    """The TITLE of the class that declares the field, the most derived one if there are several."""
    declares = next(owner for owner in record.__mro__ if name in inspect.get_annotations(owner))
    return str(declares.__dict__["TITLE"])


def add_flags(parser: argparse.ArgumentParser, record: type) -> None:
    """Add the record's flags to `parser`, one group per class, the record's own group first. The
    parsed namespace holds only flags that were given."""
    flags = flags_of(record)
    titles = [owner.__dict__["TITLE"] for owner in record.__mro__ if "TITLE" in owner.__dict__]
    titles += [item.title for item in flags if item.record]
    for title in dict.fromkeys(titles):
        own = [item for item in flags if item.title == title]
        if own:
            group = parser.add_argument_group(title)
        for item in own:
            _add_flag(group, item)


def _add_flag(group: argparse._ArgumentGroup, item: Flag) -> None:
    if item.positional:
        group.add_argument(
            item.name, metavar=item.metavar, help=item.help, type=_argparse_type(item)
        )
        return
    kwargs: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS}
    kwargs["help"] = argparse.SUPPRESS if item.hidden else _help(item)
    if item.hint is bool:
        kwargs["action"] = argparse.BooleanOptionalAction
    else:
        kwargs["type"] = _argparse_type(item)
        kwargs["metavar"] = item.metavar or _metavar(item)
        if item.several:
            kwargs |= {"action": _Several, "nargs": "+"}
        if item.bare:
            kwargs |= {"nargs": "?", "const": item.bare}
    group.add_argument(*([item.short] if item.short else []), item.option, **kwargs)


class _Several(argparse.Action):
    """Collects all values of a flag in one tuple; each word may itself be a list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, ())
        setattr(namespace, self.dest, (*before, *chain.from_iterable(values)))


def merge_options(record: type[R], given: Mapping[str, Any], variables: Mapping[str, str]) -> R:
    """Merge into a record: the command line wins over the environment, which wins over defaults.
    `variables` is keyed by names such as BATON_PORT. Raise UsageError."""
    flags = flags_of(record)
    values = {item.name: given[item.name] for item in flags if item.name in given}
    _check_exclusive(flags, values, lambda item: item.option)
    from_environment = {
        item.name: _from_variable(item, variables[item.variable])
        for item in flags
        if item.has_variable and item.name not in values and variables.get(item.variable)
    }
    for name in _excluded_fields(flags, values):
        from_environment.pop(name, None)
    _check_exclusive(flags, from_environment, lambda item: item.variable)
    return make_record(record, values | from_environment)


def _excluded_fields(flags: Sequence[Flag], values: Mapping[str, Any]) -> set[str]:
    """The fields that the given flags exclude. A flag overrides the variable of an excluded field,
    just as it overrides its own variable."""
    pairs = [(item.name, item.excludes) for item in flags if item.excludes]
    return {b for a, b in pairs if a in values} | {a for a, b in pairs if b in values}


def make_record(record: type[R], values: Mapping[str, Any]) -> R:
    """Build the record from `values`, which is keyed by flag name."""
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for item in flags_of(record):
        if item.name in values:
            holder = inner.setdefault(item.record, {}) if item.record else own
            holder[item.field] = values[item.name]
    defaults = record()
    for name, changes in inner.items():
        own[name] = replace(getattr(defaults, name), **changes)
    return record(**own)


def to_variables(options: Any) -> dict[str, str]:
    """The variables that carry the secret values of `options`: every user of a machine can read a
    command line, but only its owner can read a process's environment."""
    return {
        item.variable: item.show(item.value_in(options))
        for item in flags_of(type(options))
        if item.secret and item.value_in(options) != item.default
    }


def to_argv(options: Any) -> list[str]:
    """The flags that, together with to_variables(), reproduce `options`."""
    argv = []
    for item in flags_of(type(options)):
        value = item.value_in(options)
        if value == item.default or item.secret:
            continue
        if item.hint is bool:
            argv.append(item.option if value else "--no-" + item.option.removeprefix("--"))
        else:
            # One word: as a separate word, a value that begins with a dash would read as a flag.
            argv.append(f"{item.option}={item.show(value)}")
    return argv


def _without_none(hint: Any) -> Any:
    """X of X | None."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        [hint] = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    return hint


def _parse(hint: Any, text: str) -> Any:
    if hint is str:
        return text
    if hint == ByteSize:
        return parse_size(text)
    if hint == Device:
        return parse_device(text)
    if hint is bool:
        return _parse_bool(text)
    if hint in (int, float):
        try:
            value = hint(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{text!r} is not a {'whole number' if hint is int else 'number'}")
        return value
    if typing.get_origin(hint) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if typing.get_origin(hint) is Literal:
        if text not in typing.get_args(hint):
            raise ValueError(f"{text!r} is not one of {', '.join(typing.get_args(hint))}")
        return text
    raise AssertionError(f"no flag can hold {hint}")


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def _argparse_type(item: Flag) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return item.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def _from_variable(item: Flag, text: str) -> Any:
    try:
        return item.parse(text)
    except ValueError as error:
        raise UsageError(f"{item.variable}: {error}") from error


def _check_exclusive(
    flags: tuple[Flag, ...], values: Mapping[str, Any], name: Callable[[Flag], str]
) -> None:
    by_name = {item.name: item for item in flags}
    for item in flags:
        if item.excludes and item.name in values and item.excludes in values:
            raise UsageError(f"give {name(by_name[item.excludes])} or {name(item)}, not both")


def _metavar(item: Flag) -> str:
    if item.choices:
        return "|".join(item.choices)
    if item.hint == ByteSize:
        return "SIZE"
    if item.hint == Device:
        return DEVICE_METAVAR
    return "N" if item.hint in (int, float) else item.name.upper()


def _help(item: Flag) -> str:
    silent = item.hint is bool or item.default in (None, "", ()) or "(default:" in item.help
    default = "" if silent else f" (default {item.show(item.default)})"
    # argparse formats help with %.
    return f"{item.help}{default} [{item.variable}]".replace("%", "%%")
