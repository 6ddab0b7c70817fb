"""The API key file, tenants and admins by key, salts, and the settings that need keys."""

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
    """`write(text)`: writes a key file, and returns its path."""

    def written(text: str | bytes) -> str:
        path = tmp_path / "keys"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return written


# --- the file -------------------------------------------------------------------------------------


def test_a_key_file_lists_keys_or_digests_and_a_tenant_may_have_several(write: Any) -> None:
    path = write(
        f"\N{ZERO WIDTH NO-BREAK SPACE}# tenants of the pool\n\nacme {ACME}\r\n"
        f"  globex\tsha256:{digest(GLOBEX).upper()}  \n# the next one: ä\nacme another"
    )
    assert read_keys(path) == {
        bytes.fromhex(digest(ACME)): Tenant("acme"),
        bytes.fromhex(digest(GLOBEX)): Tenant("globex"),
        bytes.fromhex(digest("another")): Tenant("acme"),
    }


def test_a_key_is_an_admin_key_if_its_line_says_admin(write: Any) -> None:
    keys = read_keys(write(f"acme {ACME}\nops sha256:{digest(GLOBEX)} admin\n"))
    assert [tenant.admin for tenant in keys.values()] == [False, True]
    tenants = Tenants(keys)
    assert tenants.admin(f"Bearer {GLOBEX}") == tenants.tenant_of(f"Bearer {GLOBEX}")
    with pytest.raises(Forbidden, match="needs an admin key") as caught:
        tenants.admin(f"Bearer {ACME}")
    assert caught.value.reason == "admin_key_required"
    with pytest.raises(Unauthorized, match="the request has no API key"):
        tenants.admin(None)


def test_the_router_s_own_admin_key_belongs_to_no_tenant(write: Any) -> None:
    tenants = Tenants(read_keys(write(f"acme {ACME}\n")), SECRET, "key-of-up")
    tenant = tenants.admin("Bearer key-of-up")
    assert (tenant.name, tenant.admin) == ("", True)
    assert tenant.salt not in ("", tenants.tenant_of(f"Bearer {ACME}").salt)


def test_without_keys_every_client_is_an_admin_unless_there_is_an_admin_key() -> None:
    assert Tenants({}).admin(None).admin
    with_admin_key = Tenants({}, admin_key="key-of-up")
    assert with_admin_key.tenant_of(None) == Tenant()
    with pytest.raises(Unauthorized):
        with_admin_key.admin(None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (ACME, "the line has 1 words; write TENANT KEY"),
        (f"acme {ACME} # ours", "the line has 4 words; write TENANT KEY"),
        (f"{ACME}! acme", "the tenant's name is invalid; use at most 64 letters"),
        (f"{'t' * 65} {ACME}", "the tenant's name is invalid"),
        ("acme sha256:key-of-acme", "sha256: is not followed by 64 hex digits"),
        (
            f"acme {ACME}\N{LATIN SMALL LETTER A WITH DIAERESIS}",
            "characters that no HTTP header can carry",
        ),
        (
            f"globex {digest('x')}\nglobex sha256:{digest(digest('x'))}",
            "this line repeats the key of line 3",
        ),
        ("globex first", "this line repeats the key of line 2; write each key once"),
    ],
)
def test_a_wrong_line_is_an_error_with_its_number_and_without_its_content(
    write: Any, line: str, message: str
) -> None:
    path = write(f"# one\nacme first\n{line}\n")
    with pytest.raises(StartError) as caught:
        read_keys(path)
    error = str(caught.value)
    number = 4 if "\n" in line else 3
    assert error.startswith(f"--api-keys {path}, line {number}: ")
    assert message in error
    without_path = error.removeprefix(f"--api-keys {path}")
    for word in (ACME, "acme", "globex", digest("x"), "t" * 65):
        assert word not in without_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no key; write lines of TENANT KEY"),
        ("# no keys yet\n\n", "contains no key"),
        (b"acme \xff\xfe\n", "is not UTF-8 text"),
    ],
)
def test_a_key_file_without_a_key_is_refused(write: Any, text: str | bytes, message: str) -> None:
    with pytest.raises(StartError, match=message):
        read_keys(write(text))


def test_a_missing_key_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"--api-keys .*/absent: No such file"):
        read_keys(str(tmp_path / "absent"))
    with pytest.raises(StartError, match="directory"):
        read_keys(str(tmp_path))


# --- authorization --------------------------------------------------------------------------------


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
def test_a_key_identifies_its_tenant(tenants: Tenants, header: str, name: str) -> None:
    tenant = tenants.tenant_of(header)
    assert (tenant.name, tenant.salt) == (name, tenant_salt(SECRET.encode(), name))


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer  ", f"Basic {ACME}", ACME])
def test_the_error_for_a_missing_key_explains_how_to_send_one(
    tenants: Tenants, header: str | None
) -> None:
    with pytest.raises(Unauthorized, match="send it as `Authorization: Bearer KEY`"):
        tenants.tenant_of(header)


@pytest.mark.parametrize(
    "key", [ACME.upper(), ACME[:-1], digest(ACME), f"sha256:{digest(ACME)}", "acme", "\udcff", "ä"]
)
def test_an_unknown_key_is_refused_and_not_shown_in_the_error(tenants: Tenants, key: str) -> None:
    with pytest.raises(Unauthorized, match="the API key is unknown") as caught:
        tenants.tenant_of(f"Bearer {key}")
    assert key not in caught.value.message or key == "acme"


def test_without_keys_every_client_is_the_unnamed_tenant() -> None:
    assert (
        Tenants({}, SECRET).tenant_of(f"Bearer {ACME}")
        == Tenants({}).tenant_of(None)
        == Tenant("", "")
    )


def test_each_tenant_and_each_secret_has_its_own_salt(write: Any) -> None:
    keys = read_keys(write(f"acme {ACME}\nglobex {GLOBEX}\nacme second\n"))
    salts = {
        Tenants(keys, secret).tenant_of(f"Bearer {key}").salt
        for secret in (SECRET, "another")
        for key in (ACME, "second", GLOBEX)
    }
    assert len(salts) == 4


def test_tenants_that_share_kv_have_names_and_no_salts(write: Any) -> None:
    path = write(f"acme {ACME}\n")
    shared = RouterSettings(nodes=NODES, api_keys=path, tenant_secret=SECRET)
    assert Tenants.of_settings(shared).tenant_of(f"Bearer {ACME}") == Tenant("acme", "")
    isolated = RouterSettings(nodes=NODES, api_keys=path, tenant_secret=SECRET, sharing="tenant")
    assert Tenants.of_settings(isolated).tenant_of(f"Bearer {ACME}").salt != ""


def test_a_tenant_s_repr_does_not_show_its_salt(tenants: Tenants) -> None:
    tenant = tenants.tenant_of(f"Bearer {ACME}")
    assert "acme" in repr(tenant)
    assert tenant.salt not in repr(tenant)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "param", "remedy"),
    [
        ({"tenant_secret": SECRET}, "sharing", "give a file of API keys"),
        ({"api_keys": "keys"}, "tenant_secret", "give all routers of the pool the same"),
    ],
)
def test_sharing_by_tenant_without_keys_or_secret_is_an_error_with_the_remedy(
    changes: dict[str, str], param: str, remedy: str
) -> None:
    with pytest.raises(InvalidRequest, match=remedy) as caught:
        RouterSettings(nodes=NODES, sharing="tenant", **changes).check()  # type: ignore[arg-type]
    assert caught.value.param == param
    assert SECRET not in caught.value.message


def test_the_settings_repr_does_not_show_the_secret() -> None:
    settings = RouterSettings(nodes=NODES, sharing="tenant", api_keys="keys", tenant_secret=SECRET)
    settings.check()
    assert SECRET not in repr(settings)
