"""The file of API keys, whose key is whose, and what their salts are; settings that need them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from baton_protocol.errors import Forbidden, InvalidRequest, Unauthorized
from baton_protocol.hashing import tenant_salt
from baton_router.auth import Tenant, Tenants, read_keys
from baton_router.errors import StartError
from baton_router.settings import RouterSettings

ACME, GLOBEX = "key-of-acme", "Key/of+globex=="
NODES = ("http://127.0.0.1:9000",)
SECRET = "a secret of the pool"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """`write(text)`: a file of keys, and its path."""

    def written(text: str | bytes) -> str:
        path = tmp_path / "keys"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return written


# --- the file -------------------------------------------------------------------------------------


def test_a_file_names_keys_or_their_digests_and_a_tenant_may_have_several(write: Any) -> None:
    path = write(
        f"\N{ZERO WIDTH NO-BREAK SPACE}# tenants of the pool\n\nacme {ACME}\r\n"
        f"  globex\tsha256:{digest(GLOBEX).upper()}  \n# the next one: ä\nacme another"
    )
    assert read_keys(path) == {
        bytes.fromhex(digest(ACME)): Tenant("acme"),
        bytes.fromhex(digest(GLOBEX)): Tenant("globex"),
        bytes.fromhex(digest("another")): Tenant("acme"),
    }


def test_a_key_is_an_admins_where_its_line_says_so(write: Any) -> None:
    keys = read_keys(write(f"acme {ACME}\nops sha256:{digest(GLOBEX)} admin\n"))
    assert [tenant.admin for tenant in keys.values()] == [False, True]
    tenants = Tenants(keys)
    assert tenants.admin(f"Bearer {GLOBEX}") == tenants.tenant_of(f"Bearer {GLOBEX}")
    with pytest.raises(Forbidden, match="needs an admin key") as caught:
        tenants.admin(f"Bearer {ACME}")
    assert caught.value.reason == "admin_key_required"
    with pytest.raises(Unauthorized, match="the request has no API key"):
        tenants.admin(None)


def test_the_routers_own_admin_key_is_an_admin_of_no_tenant(write: Any) -> None:
    tenants = Tenants(read_keys(write(f"acme {ACME}\n")), SECRET, "key-of-up")
    found = tenants.admin("Bearer key-of-up")
    assert (found.name, found.admin) == ("", True)
    assert found.salt not in ("", tenants.tenant_of(f"Bearer {ACME}").salt)


def test_without_keys_everybody_may_see_all_and_with_an_admin_key_only_who_has_it() -> None:
    assert Tenants({}).admin(None).admin
    alone = Tenants({}, admin_key="key-of-up")
    assert alone.tenant_of(None) == Tenant()
    with pytest.raises(Unauthorized):
        alone.admin(None)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (ACME, "the line has 1 words; write TENANT KEY"),
        (f"acme {ACME} # ours", "the line has 4 words; write TENANT KEY"),
        (f"{ACME}! acme", "the tenant's name is invalid; use at most 64 letters"),
        (f"{'t' * 65} {ACME}", "the tenant's name is invalid"),
        ("acme sha256:key-of-acme", "sha256: is not followed by 64 hex digits"),
        (f"acme {ACME}\N{LATIN SMALL LETTER A WITH DIAERESIS}", "characters that no HTTP header can carry"),
        (f"globex {digest('x')}\nglobex sha256:{digest(digest('x'))}", "this line repeats the key of line 3"),
        ("globex first", "this line repeats the key of line 2; write each key once"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_and_no_word_of_it_is_shown(
    write: Any, line: str, told: str
) -> None:
    path = write(f"# one\nacme first\n{line}\n")
    with pytest.raises(StartError) as caught:
        read_keys(path)
    shown = str(caught.value)
    number = 4 if "\n" in line else 3
    assert shown.startswith(f"--api-keys {path}, line {number}: ")
    assert told in shown
    told_of = shown.removeprefix(f"--api-keys {path}")
    for word in (ACME, "acme", "globex", digest("x"), "t" * 65):
        assert word not in told_of


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "contains no key; write lines of TENANT KEY"),
        ("# nobody yet\n\n", "contains no key"),
        (b"acme \xff\xfe\n", "is not UTF-8 text"),
    ],
)
def test_a_file_without_a_key_is_refused_since_nobody_could_ask(
    write: Any, text: str | bytes, told: str
) -> None:
    with pytest.raises(StartError, match=told):
        read_keys(write(text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"--api-keys .*/absent: No such file"):
        read_keys(str(tmp_path / "absent"))
    with pytest.raises(StartError, match="directory"):
        read_keys(str(tmp_path))


# --- who it is ------------------------------------------------------------------------------------


@pytest.fixture
def tenants(write: Any) -> Tenants:
    return Tenants(read_keys(write(f"acme {ACME}\nglobex {GLOBEX}\nacme second\n")), SECRET)


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (f"Bearer {ACME}", "acme"),
        (f"bearer  {ACME} ", "acme"),
        ("BEARER second", "acme"),
        (f"Bearer {GLOBEX}", "globex"),
    ],
)
def test_a_key_is_its_tenants(tenants: Tenants, header: str, name: str) -> None:
    found = tenants.tenant_of(header)
    assert (found.name, found.salt) == (name, tenant_salt(SECRET.encode(), name))


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer  ", f"Basic {ACME}", ACME])
def test_a_request_without_a_key_is_told_how_to_send_one(
    tenants: Tenants, header: str | None
) -> None:
    with pytest.raises(Unauthorized, match="send it as `Authorization: Bearer KEY`"):
        tenants.tenant_of(header)


@pytest.mark.parametrize(
    "key", [ACME.upper(), ACME[:-1], digest(ACME), f"sha256:{digest(ACME)}", "acme", "\udcff", "ä"]
)
def test_a_key_that_is_not_in_the_file_is_refused_unseen(tenants: Tenants, key: str) -> None:
    with pytest.raises(Unauthorized, match="the API key is unknown") as caught:
        tenants.tenant_of(f"Bearer {key}")
    assert key not in caught.value.message or key == "acme"


def test_without_keys_everybody_is_nobody_in_particular() -> None:
    assert Tenants({}, SECRET).tenant_of(f"Bearer {ACME}") == Tenants({}).tenant_of(None) == Tenant("", "")


def test_salts_are_a_tenants_own_and_another_secrets_are_others(write: Any) -> None:
    keys = read_keys(write(f"acme {ACME}\nglobex {GLOBEX}\nacme second\n"))
    salts = {
        Tenants(keys, secret).tenant_of(f"Bearer {key}").salt
        for secret in (SECRET, "another")
        for key in (ACME, "second", GLOBEX)
    }
    assert len(salts) == 4


def test_tenants_that_share_have_names_and_no_salts(write: Any) -> None:
    path = write(f"acme {ACME}\n")
    shared = RouterSettings(nodes=NODES, api_keys=path, tenant_secret=SECRET)
    assert Tenants.of_settings(shared).tenant_of(f"Bearer {ACME}") == Tenant("acme", "")
    apart = RouterSettings(nodes=NODES, api_keys=path, tenant_secret=SECRET, sharing="tenant")
    assert Tenants.of_settings(apart).tenant_of(f"Bearer {ACME}").salt != ""


def test_a_tenant_does_not_show_its_salt(tenants: Tenants) -> None:
    found = tenants.tenant_of(f"Bearer {ACME}")
    assert "acme" in repr(found)
    assert found.salt not in repr(found)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "param", "remedy"),
    [
        ({"tenant_secret": SECRET}, "sharing", "give a file of API keys"),
        ({"api_keys": "keys"}, "tenant_secret", "give all routers of the pool the same"),
    ],
)
def test_tenants_that_cannot_be_told_apart_are_refused_with_the_remedy(
    changes: dict[str, str], param: str, remedy: str
) -> None:
    with pytest.raises(InvalidRequest, match=remedy) as caught:
        RouterSettings(nodes=NODES, sharing="tenant", **changes).check()  # type: ignore[arg-type]
    assert caught.value.param == param
    assert SECRET not in caught.value.message


def test_settings_do_not_show_the_secret() -> None:
    settings = RouterSettings(nodes=NODES, sharing="tenant", api_keys="keys", tenant_secret=SECRET)
    settings.check()
    assert SECRET not in repr(settings)
