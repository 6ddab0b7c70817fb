"""URLs in, addresses out; passwords stay inside."""

from __future__ import annotations

import ssl

import pytest

from baton_kvstore.endpoint import Endpoint, parse_endpoint
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
def test_a_url_gives_an_address_and_a_label(url: str, endpoint: Endpoint, label: str) -> None:
    parsed = parse_endpoint(url)
    assert parsed == endpoint
    assert parsed.label == label
    assert SECRET not in repr(parsed) + parsed.label


@pytest.mark.parametrize(
    ("url", "words"),
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
def test_a_wrong_url_is_named_without_its_password(url: str, words: str) -> None:
    with pytest.raises(StoreMisconfigured, match=words) as caught:
        parse_endpoint(url)
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value.__cause__)


def test_tls_verifies_unless_it_is_told_not_to() -> None:
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


def test_a_missing_tls_file_is_named() -> None:
    with pytest.raises(StoreMisconfigured, match="TLS files of rediss://h:6379"):
        parse_endpoint("rediss://h?ssl_ca_certs=/nowhere.pem").tls_context()
