"""Both roles over TLS with restricted users, as on a Redis that other applications share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton_kvstore.connection.endpoint import with_login
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.errors import StoreUnavailable
from baton_kvstore.index.markers import Index
from baton_kvstore.index.registry import Registry
from baton_protocol.ids import RequestId
from baton_protocol.store import InboxEntry
from tests.kvstore.conftest import MakeTransfers
from tests.support.stores.kvstore import (
    EPOCH,
    FINGERPRINT,
    PATIENT,
    chunk_name,
    node_report,
    payload_of,
    plain_client,
    wait_until,
)
from tests.support.wires.tls import make_certificate, tls_before
from tests.support.wires.wire import WireLoop

pytestmark = pytest.mark.integration

ONE = chunk_name(1)
FREQUENT_CHECKS = replace(PATIENT, idle_check_s=0.05)
# The only commands that each role needs; the docs and the chart list the same ones.
DATA_COMMANDS = ["+set", "+getex", "+del", "+ping", "+info", "+select"]
INDEX_CATEGORIES = ["+@all", "-@dangerous"]
PASSWORD = "pa$s:w@rd/1"


@pytest.fixture
def loop() -> Iterator[WireLoop]:
    loop = WireLoop()
    yield loop
    loop.close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return make_certificate(tmp_path)


@pytest.fixture
def restricted(single: EmbeddedStore) -> EmbeddedStore:
    """A store that admits only the two restricted users."""
    with plain_client(single.data_urls[0]) as client:
        client.acl_setuser(
            "kv", enabled=True, passwords=[f"+{PASSWORD}"], keys=["kv1:*"], commands=DATA_COMMANDS
        )
        client.config_set("requirepass", "another user's")
    with plain_client(single.index_url) as client:
        client.acl_setuser(
            "ix",
            enabled=True,
            passwords=[f"+{PASSWORD}"],
            keys=["kv1:*", "h1:*", "n1:*"],
            categories=INDEX_CATEGORIES,
            commands=["+info"],
        )
        client.config_set("requirepass", "another user's")
    return single


def test_chunks_are_transferred_over_tls_as_a_restricted_user(
    restricted: EmbeddedStore,
    loop: WireLoop,
    certificate: Path,
    make_transfers: MakeTransfers,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    with tls_before(loop, restricted.data_urls[0], certificate) as place:
        url = with_login(f"rediss://{place}?ssl_ca_certs={certificate}", "kv", PASSWORD)
        transfers = make_transfers((url,), tuning=FREQUENT_CHECKS, settings="apply")
        names = [chunk_name(number) for number in range(20)]
        markers = [transfers.stored(name) for name in names]
        for name, marker in zip(names, markers, strict=True):
            assert transfers.get(name, marker)[1] == payload_of(name)
        wait_until(
            lambda: transfers.plane.instances()[0].used_bytes > 0, "the server to be checked"
        )
        transfers.plane.close()
    assert PASSWORD not in caplog.text


@pytest.mark.parametrize(
    ("user", "password", "authority", "expected"),
    [
        ("kv", "wr0ng", True, "WRONGPASS"),
        ("", "", True, "NOAUTH"),
        ("kv", PASSWORD, False, "certificate verify failed"),
    ],
)
def test_reasons_for_a_wrong_login_or_certificate_do_not_show_the_password(
    restricted: EmbeddedStore,
    loop: WireLoop,
    certificate: Path,
    make_transfers: MakeTransfers,
    caplog: pytest.LogCaptureFixture,
    user: str,
    password: str,
    authority: bool,
    expected: str,
) -> None:
    with tls_before(loop, restricted.data_urls[0], certificate) as place:
        option = f"?ssl_ca_certs={certificate}" if authority else ""
        url = with_login(f"rediss://{place}{option}", user, password)
        transfers = make_transfers((url,), tuning=FREQUENT_CHECKS)
        reason = transfers.put(ONE).reason
        assert expected in reason
        assert not password or password not in reason + caplog.text
        transfers.plane.close()


def test_without_write_permission_only_puts_are_refused(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    marker = make_transfers(single.data_urls).stored(ONE)
    with plain_client(single.data_urls[0]) as client:
        may_read = [command for command in DATA_COMMANDS if command != "+set"]
        client.acl_setuser(
            "kv", enabled=True, passwords=[f"+{PASSWORD}"], keys=["kv1:*"], commands=may_read
        )
    transfers = make_transfers(
        (with_login(single.data_urls[0], "kv", PASSWORD),), tuning=FREQUENT_CHECKS
    )
    assert "NOPERM" in transfers.put(ONE).reason
    assert "NOPERM" in transfers.plane.put_troubles[0]
    assert transfers.plane.troubles == ("",)
    assert transfers.get(ONE, marker)[1] == payload_of(ONE)


async def test_markers_inboxes_and_reports_work_over_tls_as_a_restricted_user(
    restricted: EmbeddedStore, loop: WireLoop, certificate: Path
) -> None:
    report = node_report()
    entry = InboxEntry(request=RequestId("r"), attempt=1, kind="end")
    with tls_before(loop, restricted.index_url, certificate) as place:
        url = with_login(f"rediss://{place}?ssl_ca_certs={certificate}", "ix", PASSWORD)
        async with Index(url, "pool") as index, Registry(url, "pool") as registry:
            await index.ping()
            assert await index.lookup(FINGERPRINT, [ONE]) == [None]
            await index.announce(report.node, EPOCH, [entry])
            assert (await index.read_inbox(report.node, EPOCH))[1] == [entry]
            await registry.register(report)
            assert [listed.node for listed in await registry.nodes()] == [report.node]
        wrong = with_login(f"rediss://{place}?ssl_ca_certs={certificate}", "ix", "wr0ng")
        async with Index(wrong, "pool") as index:
            with pytest.raises(StoreUnavailable) as caught:
                await index.ping()
            assert "wr0ng" not in str(caught.value)
            with pytest.raises(StoreUnavailable) as caught:
                await index.lookup(FINGERPRINT, [ONE])
            assert "wr0ng" not in str(caught.value)
