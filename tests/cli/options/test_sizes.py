"""Sizes in bytes with units: parsing and printing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_cli.options.sizes import parse_size, show_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", 1 << 30),
        ("512MiB", 512 << 20),
        ("2GB", 2 * 10**9),
        ("1.5 KiB", 1536),
        ("4096", 4096),
        ("7b", 7),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1Gx", "-1", "1e9", "1 G iB"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write 1GiB"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_printed_size_parses_to_the_same_number(size: int) -> None:
    assert parse_size(show_size(size)) == size
