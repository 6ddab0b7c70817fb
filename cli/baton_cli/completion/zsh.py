"""The script for zsh: a function per command, which gives its flags to _arguments."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from baton_cli.completion.words import CommandWords, FlagWords, groups

HEAD = """\
#compdef baton
# Completion of `baton` for zsh. In ~/.zshrc, after compinit: source <(baton completion zsh)

"""
# As a file _baton of $fpath the script is the function's body, and sourced it defines one.
TAIL = """\
if [[ ${funcstack[1]} == _baton ]]; then
    _baton "$@"
else
    compdef _baton baton
fi
"""


def script(commands: Sequence[CommandWords]) -> str:
    heads = [(group.name, group.about) for group in groups()]
    singles = [command for command in commands if len(command.words) == 1]
    top = [*heads, *((command.words[0], command.about) for command in singles)]
    functions = [_function(command) for command in commands]
    for name, _ in heads:
        inner = [command for command in commands if command.words[0] == name]
        below = [(command.words[1], command.about) for command in inner]
        functions.append(_chooser(f"_baton_{name}", below))
    return HEAD + "\n".join([*functions, _chooser("_baton", top), TAIL])


def _chooser(function: str, below: Iterable[tuple[str, str]]) -> str:
    """A function that completes the next word, and goes on with the function of that word."""
    names = " ".join(_quoted(f"{_escaped(name)}:{about}") for name, about in below)
    return (
        f"{function}() {{\n"
        "    local context line state state_descr\n"
        "    typeset -A opt_args\n"
        "    _arguments -C '1: :->command' '*:: :->rest'\n"
        "    case $state in\n"
        f"        command) local -a commands=({names}); _describe command commands ;;\n"
        f"        rest) (( $+functions[{function}_${{line[1]//-/_}}] ))"
        f" && {function}_${{line[1]//-/_}} ;;\n"
        "    esac\n"
        "}\n"
    )


def _function(command: CommandWords) -> str:
    name = "_".join(("_baton", *command.words)).replace("-", "_")
    specs = [spec for flag in command.flags for spec in _specs(flag)]
    if command.arguments:
        specs.append(f"1:argument:({' '.join(command.arguments)})")
    lines = " \\\n".join(f"        {_quoted(spec)}" for spec in specs)
    return f"{name}() {{\n    _arguments \\\n{lines}\n}}\n"


def _specs(flag: FlagWords) -> list[str]:
    about = f"[{_escaped(flag.about)}]"
    if flag.takes == "nothing":
        return [f"{name}{about}" for name in flag.names]
    [name] = flag.names
    values = {"choice": f"({' '.join(flag.choices)})", "path": "_files", "text": " "}
    return [f"{name}={about}:value:{values[flag.takes]}"]


def _escaped(text: str) -> str:
    """For _arguments, to which brackets and colons mean something."""
    for mark in "\\[]:":
        text = text.replace(mark, f"\\{mark}")
    return text


def _quoted(text: str) -> str:
    return shlex.quote(text)
