"""The command tree: maps a command line to a runner, and an error to one line and an exit code.

In: argv and the environment. Out: an exit code: 0 success, 1 failure (one line on stderr gives the
reason), 2 a wrong flag or variable, or another of the command's own. A command's module is imported
only when that command runs: `baton --help` costs no more than argparse.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from baton_cli.bench.options import LatencyOptions, SweepOptions, ThroughputOptions
from baton_cli.bench.serve_options import ServeOptions
from baton_cli.commands import help_texts as texts
from baton_cli.commands.completion_options import CompletionOptions
from baton_cli.commands.explain_options import ExplainOptions
from baton_cli.commands.fetch_options import FetchDemoOptions, FetchOptions
from baton_cli.commands.generate_options import GenerateOptions
from baton_cli.commands.operator_options import OperatorOptions
from baton_cli.commands.router_options import ChatOptions, TopOptions
from baton_cli.commands.run_batch_options import RunBatchOptions
from baton_cli.commands.usage_options import UsageOptions
from baton_cli.doctor.options import DoctorOptions
from baton_cli.errors import CommandError, UsageError
from baton_cli.options.environment import closest, own_variables
from baton_cli.options.flag import add_flags, flags_of, merge_options
from baton_cli.options.records import (
    CommonOptions,
    NodeOptions,
    RouterOptions,
    UpOptions,
    VersionOptions,
)

FIRST_IN_A_CONTAINER = 1  # process id


class Command(NamedTuple):
    """`runner` is "module:function"; the function takes the options record and returns the exit
    code. `extra` names the pip extra that installs the command's imports, "" if it needs none."""

    words: str
    options: type[CommonOptions]
    runner: str
    extra: str
    summary: str
    epilog: str = ""


COMMANDS = (
    Command("up", UpOptions, "baton_cli.commands.up:run", "local", texts.UP, texts.UP_EXAMPLES),
    Command(
        "prefill",
        NodeOptions,
        "baton_cli.commands.roles:prefill",
        "node",
        texts.PREFILL,
        texts.NODE_EXAMPLES,
    ),
    Command(
        "decode",
        NodeOptions,
        "baton_cli.commands.roles:decode",
        "node",
        texts.DECODE,
        texts.NODE_EXAMPLES,
    ),
    Command(
        "router",
        RouterOptions,
        "baton_cli.commands.roles:router",
        "router",
        texts.ROUTER,
        texts.ROUTER_EXAMPLES,
    ),
    Command(
        "operator",
        OperatorOptions,
        "baton_cli.commands.operator:run",
        "operator",
        texts.OPERATOR,
        texts.OPERATOR_EXAMPLES,
    ),
    Command(
        "generate",
        GenerateOptions,
        "baton_cli.commands.generate:run",
        "node",
        texts.GENERATE,
        texts.GENERATE_EXAMPLES,
    ),
    Command(
        "run-batch",
        RunBatchOptions,
        "baton_cli.commands.run_batch:run",
        "local",
        texts.RUN_BATCH,
        texts.RUN_BATCH_EXAMPLES,
    ),
    Command(
        "bench throughput",
        ThroughputOptions,
        "baton_cli.commands.bench:throughput",
        "node",
        texts.THROUGHPUT,
        texts.THROUGHPUT_EXAMPLES,
    ),
    Command(
        "bench latency",
        LatencyOptions,
        "baton_cli.commands.bench:latency",
        "node",
        texts.LATENCY,
        texts.LATENCY_EXAMPLES,
    ),
    Command(
        "bench sweep",
        SweepOptions,
        "baton_cli.commands.bench_sweep:run",
        "node",
        texts.SWEEP,
        texts.SWEEP_EXAMPLES,
    ),
    Command(
        "bench serve",
        ServeOptions,
        "baton_cli.commands.bench_serve:run",
        "serve",
        texts.SERVE,
        texts.SERVE_EXAMPLES,
    ),
    Command(
        "model fetch",
        FetchOptions,
        "baton_cli.commands.model_fetch:run",
        "serve",
        texts.FETCH,
        texts.FETCH_EXAMPLES,
    ),
    Command(
        "model fetch-demo",
        FetchDemoOptions,
        "baton_cli.commands.fetch_demo:run",
        "local",
        texts.FETCH_DEMO,
    ),
    Command(
        "explain",
        ExplainOptions,
        "baton_cli.commands.explain:run",
        "",
        texts.EXPLAIN,
        texts.EXPLAIN_EXAMPLES,
    ),
    Command(
        "doctor",
        DoctorOptions,
        "baton_cli.doctor.run:run",
        "",
        texts.DOCTOR,
        texts.DOCTOR_EXAMPLES,
    ),
    Command(
        "chat", ChatOptions, "baton_cli.commands.chat:run", "", texts.CHAT, texts.CHAT_EXAMPLES
    ),
    Command("top", TopOptions, "baton_cli.commands.top:run", "", texts.TOP, texts.TOP_EXAMPLES),
    Command(
        "completion",
        CompletionOptions,
        "baton_cli.completion:run",
        "",
        texts.COMPLETION,
        texts.COMPLETION_EXAMPLES,
    ),
    Command(
        "usage",
        UsageOptions,
        "baton_cli.commands.usage:run",
        "",
        texts.USAGE,
        texts.USAGE_EXAMPLES,
    ),
    Command("version", VersionOptions, "baton_cli.commands.version:run", "", texts.VERSION),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` defaults to the process's arguments."""
    words = sys.argv[1:] if argv is None else list(argv)
    if os.getpid() == FIRST_IN_A_CONTAINER:
        # The kernel gives process 1 no default signal actions: without this handler, SIGTERM would
        # do nothing until a role installs its own, and nothing at all in the other commands.
        signal.signal(signal.SIGTERM, _end)
    try:
        command, options = read_command(words, os.environ)
        module, function = command.runner.split(":")
        return int(getattr(import_module(module), function)(options))
    except CommandError as error:
        print(f"baton: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("baton"):
            raise
        print(
            f"baton: `baton {command.words}` needs {error.name}, which is not installed;"
            f" pip install '.[{command.extra}]' in the checkout",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader closed our stdout (`baton --help | head`). Silence the flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def read_command(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Command, CommonOptions]:
    """Return the chosen command and its options. Raise UsageError, or SystemExit from argparse."""
    given = vars(build_parser().parse_args(argv))
    command: Command = given.pop("command")
    try:
        variables = own_variables(environ, known_variables())
        return command, merge_options(command.options, given, variables)
    except UsageError as error:
        raise UsageError(f"{error} (see baton {command.words} --help)") from error


def known_variables() -> frozenset[str]:
    """The variables of all commands, because the pods of one pool may share one environment."""
    return frozenset(
        item.variable
        for command in COMMANDS
        for item in flags_of(command.options)
        if item.has_variable
    )


def _positional(command: Command) -> list[str]:
    return [item.metavar for item in flags_of(command.options) if item.positional]


class _CommandParser(argparse.ArgumentParser):
    """One command's parser: an unknown flag is an error that names the closest one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hints = "".join(
                self._hint(argument) for argument in unknown if argument.startswith("-")
            )
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hints}")
        return parsed, unknown

    def _hint(self, argument: str) -> str:
        flags = [flag for action in self._actions for flag in action.option_strings]
        close = closest(argument.split("=")[0], flags, "--")
        return f"; did you mean {close}?" if close else ""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton",
        description=texts.BATON,
        epilog=texts.TOUR,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    trees = {
        "": parser.add_subparsers(
            metavar="COMMAND", title="commands", required=True, parser_class=_CommandParser
        )
    }
    for command in COMMANDS:
        *group, leaf = command.words.split(" ")
        for name in group:
            if name not in trees:
                inner = trees[""].add_parser(name, help=texts.GROUPS[name], allow_abbrev=False)
                trees[name] = inner.add_subparsers(
                    metavar="COMMAND", required=True, parser_class=_CommandParser
                )
        command_parser = trees[" ".join(group)].add_parser(
            leaf,
            help=command.summary.split(".")[0],
            description=command.summary,
            epilog=command.epilog,
            usage=" ".join(["baton", command.words, *_positional(command), "[flags]"]),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_flags(command_parser, command.options)
        command_parser.set_defaults(command=command)
    return parser
