"""Parsing of Redis URLs. Passwords never appear in messages."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_kvstore.connection.endpoint import Endpoint, parse_endpoint, with_login
from baton_kvstore.errors import StoreMisconfigured

SECRET = "s3cret-word"


@pytest.mark.parametrize(
    ("url", "endpoint", "label"),
    [
        ("unix:///run/a.sock", Endpoint(kind="unix", path="/run/a.sock"), "unix:///run/a.sock"),
        (
            "unix:///run/a.sock?db=2",
            Endpoint(kind="unix", path="/run/a.sock", db=2),
            "unix:///run/a.sock?db=2",
        ),
        ("redis://h", Endpoint(kind="tcp", host="h"), "redis://h:6379"),
        ("redis://h:7/3", Endpoint(kind="tcp", host="h", port=7, db=3), "redis://h:7/3"),
        ("redis://[::1]:7", Endpoint(kind="tcp", host="::1", port=7), "redis://[::1]:7"),
        (
            f"rediss://me:{SECRET}@h:7",
            Endpoint(kind="tls", host="h", port=7, username="me", password=SECRET),
            "rediss://h:7",
        ),
        (
            f"redis://:{SECRET}%40@h",
            Endpoint(kind="tcp", host="h", password=f"{SECRET}@"),
            "redis://h:6379",
        ),
    ],
)
def test_a_url_is_parsed_into_an_endpoint_with_a_label(
    url: str, endpoint: Endpoint, label: str
) -> None:
    parsed = parse_endpoint(url)
    assert parsed == endpoint
    assert parsed.label == label
    assert SECRET not in repr(parsed) + parsed.label


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://h", "'http' is unknown"),
        ("h:6379", "unknown"),
        ("unix://", "needs a path"),
        ("redis://", "needs a host"),
        (f"redis://:{SECRET}@h:port", "not a Redis URL"),
        (f"redis://:{SECRET}/more@h", "bad host or port"),
        (f"redis://me:12/{SECRET}@h", "database in the URL is not a number"),
        (f"redis://:{SECRET}@h/x", "database 'x' is not a number"),
        (f"redis://:{SECRET}@h?ssl_ca_certs=f", "unknown Redis URL options: ssl_ca_certs"),
        (f"redis://:{SECRET}@{'h' * 70}.example", "not a Redis URL"),
    ],
)
def test_the_error_for_a_wrong_url_does_not_show_its_password(url: str, message: str) -> None:
    with pytest.raises(StoreMisconfigured, match=message) as caught:
        parse_endpoint(url)
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value.__cause__)


def test_tls_verifies_unless_the_url_disables_it() -> None:
    checked = parse_endpoint("rediss://h").tls_context()
    assert checked is not None
    assert (checked.check_hostname, checked.verify_mode) == (True, ssl.CERT_REQUIRED)
    unnamed = parse_endpoint("rediss://h?ssl_check_hostname=false").tls_context()
    assert unnamed is not None
    assert (unnamed.check_hostname, unnamed.verify_mode) == (False, ssl.CERT_REQUIRED)
    trusting = parse_endpoint("rediss://h?ssl_cert_reqs=none").tls_context()
    assert trusting is not None
    assert (trusting.check_hostname, trusting.verify_mode) == (False, ssl.CERT_NONE)
    assert parse_endpoint("redis://h").tls_context() is None


def test_a_missing_tls_file_is_an_error_that_names_the_server() -> None:
    with pytest.raises(StoreMisconfigured, match="TLS files of rediss://h:6379"):
        parse_endpoint("rediss://h?ssl_ca_certs=/nowhere.pem").tls_context()


@given(
    st.sampled_from(
        ["redis://h:7/3", "rediss://[::1]?ssl_ca_certs=f", "unix:///run/a b.sock?db=2"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
)
def test_with_login_encodes_any_characters(url: str, username: str, password: str) -> None:
    plain, parsed = parse_endpoint(url), parse_endpoint(with_login(url, username, password))
    assert (parsed.username, parsed.password) == (username, password)
    assert parsed.label == plain.label
    assert parsed.options == plain.options


@pytest.mark.parametrize("url", ["redis://me@h", "redis://:own@h", "unix://me:own@/run/a.sock"])
def test_a_url_with_a_login_keeps_it(url: str) -> None:
    assert with_login(url, "other", SECRET) == url


def test_without_a_login_the_url_stays_unchanged() -> None:
    assert with_login("redis://h", "", "") == "redis://h"


def test_an_empty_login_in_a_url_is_replaced() -> None:
    assert parse_endpoint(with_login("redis://:@h", "me", SECRET)).username == "me"


def test_the_error_for_an_invalid_url_or_login_does_not_show_the_password() -> None:
    with pytest.raises(StoreMisconfigured, match="'http' is unknown") as caught:
        with_login("http://h", "me", SECRET)
    assert SECRET not in str(caught.value)
    with pytest.raises(StoreMisconfigured, match="is not UTF-8") as caught:
        with_login("redis://h", "me", SECRET + "\udc80")
    assert SECRET not in str(caught.value) + repr(caught.value.__cause__)
