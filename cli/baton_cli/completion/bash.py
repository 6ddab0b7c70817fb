"""The script for bash: one function that looks up the command, then the flag before the cursor."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from baton_cli.completion.words import CommandWords, FlagWords, groups

# bash splits --flag=value at "=", which it hands over as a word of its own.
HEAD = """\
# Completion of `baton` for bash. In ~/.bashrc: source <(baton completion bash)

_baton() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
    local command=${COMP_WORDS[1]} words='' paths=''
    COMPREPLY=()
    if [[ $current == = ]]; then
        current=''
    elif [[ $before == = ]]; then
        before=${COMP_WORDS[COMP_CWORD-2]}
    fi
    if ((COMP_CWORD == 1)); then
        command=''
    fi
    case $command in
"""
TAIL = """\
    esac
    if [[ $paths ]]; then
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
    else
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    fi
}

complete -F _baton baton
"""


def script(commands: Sequence[CommandWords]) -> str:
    names = [group.name for group in groups()]
    top = dict.fromkeys(command.words[0] for command in commands)
    cases = [f"        '') words={_quoted(top)} ;;"]
    for name in names:
        inner = [command for command in commands if command.words[0] == name]
        below = _quoted(command.words[1] for command in inner)
        cases.append(f"        {name})\n            if ((COMP_CWORD == 2)); then words={below}")
        cases.append("            else case ${COMP_WORDS[2]} in")
        cases += [_case(command, command.words[1]) for command in inner]
        cases.append("            esac; fi ;;")
    cases += [_case(command, command.words[0]) for command in commands if len(command.words) == 1]
    return HEAD + "\n".join(cases) + "\n" + TAIL


def _case(command: CommandWords, word: str) -> str:
    """What can follow: the values of the flag before the cursor, else flags and arguments."""
    names = [name for flag in command.flags for name in flag.names]
    others = _quoted([*command.arguments, *names])
    flags = [_values(flag) for flag in command.flags if flag.takes != "nothing"]
    return "\n".join(
        [
            f"        {word}) case $before in",
            *flags,
            f"            *) words={others} ;;",
            "        esac ;;",
        ]
    )


def _values(flag: FlagWords) -> str:
    [name] = flag.names
    if flag.takes == "path":
        return f"            {name}) paths=yes ;;"
    return f"            {name}) words={_quoted(flag.choices)} ;;"


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))
