"""What can be completed: commands, flags, and what may follow a flag.

In: the table of commands and their option records. Out: plain words, which the shells' scripts
quote.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from baton_cli.commands.help_texts import GROUPS
from baton_cli.main import COMMANDS, Command
from baton_cli.options.flag import Flag, flags_of
from baton_engine.config.engine_config import Device

# What follows a flag: nothing, one of `choices`, a path of a file or folder, or any other text.
Takes = Literal["nothing", "choice", "path", "text"]
PATHS = ("FILE", "DIR", "PATH")  # metavars of options that are paths
# Options of a model or its tokenizer: a folder or a file, but also an id of a hub.
PATH_NAMES = ("model", "tokenizer")
DEVICES = ("cpu", "cuda")


class FlagWords(NamedTuple):
    """A flag, or of a switch the one that turns it on and the one that turns it off."""

    names: tuple[str, ...]
    about: str
    takes: Takes
    choices: tuple[str, ...] = ()


class CommandWords(NamedTuple):
    """`words` are one or two; `arguments` may follow beside the flags."""

    words: tuple[str, ...]
    about: str
    flags: tuple[FlagWords, ...]
    arguments: tuple[str, ...] = ()


class GroupWords(NamedTuple):
    name: str
    about: str


HELP = FlagWords(("--help",), "show the help", "nothing")


def command_words() -> tuple[CommandWords, ...]:
    return tuple(_command_words(command) for command in COMMANDS)


def groups() -> tuple[GroupWords, ...]:
    """First words of commands of two words."""
    return tuple(GroupWords(name, about) for name, about in GROUPS.items())


def _command_words(command: Command) -> CommandWords:
    flags = [item for item in flags_of(command.options) if not item.hidden]
    return CommandWords(
        tuple(command.words.split(" ")),
        _first_sentence(command.summary),
        (*(_flag_words(item) for item in flags if not item.positional), HELP),
        tuple(choice for item in flags if item.positional for choice in item.choices),
    )


def _flag_words(item: Flag) -> FlagWords:
    about = _first_sentence(item.help)
    if item.hint is bool:
        off = "--no-" + item.option.removeprefix("--")
        return FlagWords((item.option, off), about, "nothing")
    if choices := item.choices or (DEVICES if item.hint == Device else ()):
        return FlagWords((item.option,), about, "choice", choices)
    is_path = item.metavar in PATHS or item.name in PATH_NAMES
    return FlagWords((item.option,), about, "path" if is_path else "text")


def _first_sentence(text: str) -> str:
    """The text up to its first full stop, semicolon or colon, as one line."""
    line = " ".join(text.split())
    ends = [place for mark in (". ", "; ", ": ") if (place := line.find(mark)) > 0]
    return line[: min(ends, default=len(line))].removesuffix(".")
