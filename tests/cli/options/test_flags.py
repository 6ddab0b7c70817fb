"""Flags override variables, which override defaults; records are turned back into argv."""

from __future__ import annotations

import argparse
import typing
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_cli.commands.fetch_options import FetchOptions
from baton_cli.errors import UsageError
from baton_cli.main import COMMANDS, known_variables
from baton_cli.options.flag import (
    Flag,
    add_flags,
    flags_of,
    make_record,
    merge_options,
    to_argv,
    to_variables,
)
from baton_cli.options.records import (
    CommonOptions,
    NodeOptions,
    RouterOptions,
    UpOptions,
)
from baton_engine.config.engine_config import Device
from baton_protocol.options import ByteSize, option


@dataclass(frozen=True, kw_only=True)
class Sample:
    TITLE = "sample"

    count: int = option(1, "a number", least=1, most=9)
    share: float = option(0.5, "a share")
    name: str = option("", "a name")
    loud: bool = option(False, "a switch")
    size: ByteSize | None = option(None, "a size")
    blocks: int | None = option(None, "or blocks", excludes="size")
    mode: Literal["a", "b"] = option("a", "a choice", bare="b")
    device: Device = option("cpu", "a device")
    urls: tuple[str, ...] = option((), "a list")
    secret: int = option(0, "hidden", hidden=True)


def read(argv: list[str], environ: dict[str, str] | None = None) -> Sample:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, Sample)
    return merge_options(Sample, vars(parser.parse_args(argv)), environ or {})


def test_without_flags_and_variables_the_defaults_apply() -> None:
    assert read([]) == Sample()


def test_a_flag_with_a_bare_value_may_stand_alone() -> None:
    assert read(["--mode"]).mode == read(["--mode", "--loud"]).mode == "b"
    assert read(["--mode", "a"]).mode == "a"


def test_a_variable_is_parsed_as_its_flag_s_type() -> None:
    environ = {"BATON_COUNT": "3", "BATON_LOUD": "yes", "BATON_URLS": "a, b", "BATON_SIZE": "1KiB"}
    assert read([], environ) == Sample(count=3, loud=True, urls=("a", "b"), size=1024)


def test_a_flag_overrides_its_variable() -> None:
    environ = {"BATON_COUNT": "3", "BATON_LOUD": "1"}
    assert read(["--count", "4", "--no-loud"], environ) == Sample(count=4, loud=False)


def test_a_flag_overrides_the_variable_of_an_excluded_flag() -> None:
    assert read(["--blocks", "4"], {"BATON_SIZE": "1KiB"}) == Sample(blocks=4)
    assert read(["--size", "1KiB"], {"BATON_BLOCKS": "4"}) == Sample(size=1024)


def test_two_flags_that_exclude_each_other_are_an_error() -> None:
    with pytest.raises(UsageError, match="give --size or --blocks, not both"):
        read(["--blocks", "4", "--size", "1KiB"])


def test_two_variables_that_exclude_each_other_are_an_error() -> None:
    with pytest.raises(UsageError, match="give BATON_SIZE or BATON_BLOCKS, not both"):
        read([], {"BATON_BLOCKS": "4", "BATON_SIZE": "1KiB"})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("COUNT", "x", "BATON_COUNT: 'x' is not a whole number"),
        ("COUNT", "0", "BATON_COUNT: 0 is too small; at least 1"),
        ("COUNT", "10", "BATON_COUNT: 10 is too large; at most 9"),
        ("SHARE", "half", "BATON_SHARE: 'half' is not a number"),
        ("SHARE", "nan", "BATON_SHARE: 'nan' is not a number"),
        ("LOUD", "maybe", "BATON_LOUD: 'maybe' is neither true nor false"),
        ("MODE", "c", "BATON_MODE: 'c' is not one of a, b"),
        ("SIZE", "big", "BATON_SIZE: 'big' is not a size"),
        ("DEVICE", "cuda:x", "BATON_DEVICE: 'cuda:x' is not a device; write cpu, cuda or cuda:N"),
        ("DEVICE", "cpu:0", "BATON_DEVICE: 'cpu:0' is not a device"),
    ],
)
def test_a_wrong_value_is_reported_with_its_variable(name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read([], {f"BATON_{name}": text})


def test_argparse_reports_a_wrong_value_of_a_flag() -> None:
    with pytest.raises(argparse.ArgumentError, match="argument --mode: 'c' is not one of a, b"):
        read(["--mode", "c"])


def test_a_hidden_flag_has_no_variable() -> None:
    assert read(["--secret", "5"], {"BATON_SECRET": "7"}).secret == 5
    assert read([], {"BATON_SECRET": "7"}).secret == 0


def _values(item: Flag) -> st.SearchStrategy[Any]:
    texts = st.text("ab-_/:. ", min_size=1, max_size=8).map(str.strip)
    texts = texts.filter(lambda text: text not in ("", "--"))  # argparse swallows a lone "--"
    if item.choices:
        return st.sampled_from(item.choices)
    if typing.get_origin(item.hint) is tuple:
        return st.lists(texts, max_size=3).map(tuple)
    if item.hint is bool:
        return st.booleans()
    if item.hint == Device:
        return st.sampled_from(["cpu", "cuda", "cuda:3"])
    if item.hint is str:
        return texts
    low = item.least or 0
    high = item.most if item.most is not None else low + 10**6
    if item.hint is float:
        return st.floats(low, high).map(lambda value: float(f"{value:.6g}"))
    return st.integers(int(low), int(high))


@st.composite
def _records(draw: st.DrawFn, record: type[CommonOptions]) -> CommonOptions:
    chosen = {}
    for item in flags_of(record):
        if item.excludes not in chosen and draw(st.booleans()):
            chosen[item.name] = draw(_values(item))
    return make_record(record, chosen)


def parser_of(record: type[CommonOptions]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_flags(parser, record)
    return parser


RECORDS: tuple[type[CommonOptions], ...] = (NodeOptions, RouterOptions, UpOptions)
PARSERS = {record: parser_of(record) for record in RECORDS}


@given(st.sampled_from(RECORDS).flatmap(_records))
def test_a_record_survives_a_round_trip_through_argv_and_variables(options: CommonOptions) -> None:
    """A child of `up` parses exactly the options that `up` passes to it."""
    parsed = vars(PARSERS[type(options)].parse_args(to_argv(options)))
    assert merge_options(type(options), parsed, to_variables(options)) == options


def test_secrets_are_in_no_repr_and_on_no_command_line() -> None:
    options = NodeOptions(
        index_url="redis://:s3cret@h",
        data_urls=("redis://:s3cret@h",),
        redis_password="s3cret",
        link_token="s3cret",
    )
    assert "s3cret" not in repr(options) + "".join(to_argv(options))
    assert set(to_variables(options)) == {
        "BATON_REDIS_INDEX",
        "BATON_REDIS_DATA",
        "BATON_REDIS_PASSWORD",
        "BATON_LINK_TOKEN",
    }


def test_a_positional_argument_is_required_and_has_no_variable() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, FetchOptions)
    assert (
        merge_options(FetchOptions, vars(parser.parse_args(["hf://a/b"])), {}).source == "hf://a/b"
    )
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parser.parse_args([])
    assert "BATON_SOURCE" not in known_variables()


def test_each_flag_has_a_help_text_and_excludes_an_existing_flag() -> None:
    for command in COMMANDS:
        for item in flags_of(command.options):
            assert item.help, item.name
            assert not item.excludes or item.excludes in {
                other.name for other in flags_of(command.options)
            }
