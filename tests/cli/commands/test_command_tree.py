"""The command line as a user sees it: help texts, one-line errors, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton_cli.errors import UsageError
from baton_cli.main import COMMANDS, Command, build_parser, read_command
from baton_cli.options.flag import flags_of
from baton_cli.options.records import UpOptions
from baton_protocol import PROTOCOL_VERSION
from tests.support.project.command import baton, baton_process


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ending:
        build_parser().parse_args([*command.split(), "--help"])
    assert ending.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words)
def test_help_names_every_flag_with_its_variable(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(command.words, capsys)
    for item in flags_of(command.options):
        assert (f"[{item.variable}]" in text) is item.has_variable
        assert ((item.metavar if item.positional else item.option) in text) is not item.hidden


@pytest.mark.integration
def test_the_top_level_help_shows_the_first_commands() -> None:
    done = baton_process("--help")
    assert done.returncode == 0

    for text in ("baton model fetch-demo", "baton up --model DIR", "curl http", "BATON_KV_MEMORY"):
        assert text in done.stdout


@pytest.mark.integration
def test_help_imports_no_heavy_library() -> None:
    script = (
        "import sys\n"
        "from baton_cli.main import main\n"
        "try: main(['up', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(str(sorted({'asyncio', 'numpy', 'torch', 'aiohttp'} & set(sys.modules))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["up", "--kv-memry", "1GiB"], "unrecognized arguments: --kv-memry"),
        (["up", "--kv-mem", "1GiB"], "unrecognized arguments: --kv-mem"),
        (["up", "--port", "70000"], "argument --port: 70000 is too large; at most 65535"),
        (["up", "--engine", "gpu"], "argument --engine: 'gpu' is not one of torch, sim"),
        (["generate", "--device", "tpu"], "'tpu' is not a device; write cpu, cuda or cuda:N"),
        (["decode", "--gpu-memory-utilization", "0"], "0 is too small; at least 0.01"),
        (["decode", "--gpu-memory-utilization", "1.1"], "1.1 is too large; at most 1"),
        (["up", "--overlap", "maybe"], "'maybe' is not one of auto, on, off"),
        (["router", "--port=-1"], "-1 is too small; at least 0"),
        (["router", "--max-body=0"], "argument --max-body: 0 is too small; at least 1"),
        (["router", "--request-timeout=0"], "--request-timeout: 0 is too small; at least 0.1"),
        (["router", "--stall-timeout=0"], "argument --stall-timeout: 0 is too small"),
        (["router", "--keepalive=0"], "argument --keepalive: 0 is too small; at least 0.1"),
        (["router", "--link-patience=-1"], "argument --link-patience: -1 is too small"),
        (["router", "--unready-wait=nan"], "argument --unready-wait: 'nan' is not a number"),
        (["router", "--wake-wait=-1"], "argument --wake-wait: -1 is too small; at least 0"),
        (["router", "--handoff-min-tokens=-1"], "--handoff-min-tokens: -1 is too small"),
        (["router", "--missing-role=wait"], "'wait' is not one of aggregate, queue, fail"),
        (["decode", "--start-timeout=0"], "argument --start-timeout: 0 is too small; at least 1"),
        (["dance"], "invalid choice: 'dance'"),
        (["up", "--prefil", "2"], "--prefil 2; did you mean --prefill?"),
        (["up", "--kv_memory=1GiB"], "--kv_memory=1GiB; did you mean --kv-memory?"),
        (["bench", "serve", "--request-rat", "2"], "did you mean --request-rate?"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_a_wrong_flag_exits_with_code_2_and_is_named(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        read_command(argv, {})
    assert ending.value.code == 2
    assert problem in capsys.readouterr().err


def test_an_unknown_variable_is_a_one_line_error_with_code_2() -> None:
    done = baton("version", variables={"BATON_KV_MEMROY": "1GiB"})
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "baton: unknown variable BATON_KV_MEMROY; did you mean BATON_KV_MEMORY?"
        " (see baton version --help)"
    ]


def test_a_service_variable_of_kubernetes_does_not_hide_our_variables() -> None:
    environ = {"BATON_PORT": "tcp://10.0.0.1:8000", "BATON_KV_MEMORY": "1MiB", "BATON_DECODE": "3"}
    command, options = read_command(["up", "--decode", "2"], environ)
    assert command.words == "up"
    assert isinstance(options, UpOptions)
    assert (options.port, options.kv_memory, options.decode) == (8000, 1 << 20, 2)


def test_flags_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="give --kv-memory or --kv-blocks, not both"):
        read_command(["up", "--kv-memory", "1GiB", "--kv-blocks", "7"], {})


def test_version_prints_the_installed_versions() -> None:
    done = baton("version")
    assert done.returncode == 0
    assert done.stdout.startswith(f"baton 0.1.0\nprotocol {PROTOCOL_VERSION}\ntorch ")


@pytest.mark.integration
def test_a_closed_pipe_causes_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m baton version | true",
        shell=True,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "Traceback" not in done.stderr


@pytest.mark.integration
def test_a_child_whose_supervisor_is_gone_exits_at_once(tmp_path: Path) -> None:
    done = baton_process(
        "router", "--redis-index", f"unix://{tmp_path}/none.sock", "--supervisor-pid", "1"
    )
    assert done.returncode != 0
    assert "the process that started this one is gone" in done.stderr
