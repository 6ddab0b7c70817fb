"""The pool's secrets: made, kept in one Secret, read back, and shown nowhere else."""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
from typing import Any

import msgspec
import pytest
import yaml

from baton_operator.api.pool import Credentials
from baton_operator.builders import build_pool, build_secret, credentials_of, new_credentials
from tests.support.kubernetes.manifests import (
    CREDENTIALS,
    SAMPLES,
    sample_pool,
    secret_values,
    templates,
)


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def words_of(credentials: Credentials) -> tuple[str, ...]:
    return msgspec.structs.astuple(credentials)


def unasked(size: int) -> bytes:
    raise AssertionError("nothing was missing")


def test_new_credentials_are_different_words_of_64_hex_digits() -> None:
    made = new_credentials(os.urandom)
    assert [len(bytes.fromhex(word)) for word in words_of(made)] == [32, 32, 32]
    assert len({*words_of(made), *words_of(new_credentials(os.urandom))}) == 6


def test_the_random_source_is_asked_for_all_of_it() -> None:
    numbers = itertools.count()
    made = new_credentials(lambda size: bytes([next(numbers)]) * size)
    assert words_of(made) == ("00" * 32, "01" * 32, "02" * 32)


def test_what_was_put_into_the_secret_is_read_back() -> None:
    assert credentials_of(build_secret(sample_pool("sim")), unasked) == CREDENTIALS


@pytest.mark.parametrize("damage", [None, encoded("short"), 5])
def test_a_secret_from_before_there_were_tenants_gets_theirs_and_keeps_the_rest(
    damage: Any,
) -> None:
    secret = build_secret(sample_pool("sim"))
    secret["data"]["tenant-secret"] = damage
    found = credentials_of(secret, lambda size: b"\x07" * size)
    assert found == msgspec.structs.replace(CREDENTIALS, tenant_secret="07" * 32)


def test_a_tenant_secret_that_is_gone_is_the_known_one_again() -> None:
    secret = build_secret(sample_pool("sim"))
    del secret["data"]["tenant-secret"]
    known = msgspec.structs.replace(CREDENTIALS, redis_password="08" * 32)
    assert credentials_of(secret, unasked, known) == CREDENTIALS


@pytest.mark.parametrize("name", SAMPLES)
def test_another_tenant_secret_replaces_only_routers_that_tell_tenants_apart(name: str) -> None:
    other = msgspec.structs.replace(CREDENTIALS, tenant_secret="07" * 32)
    before = templates(build_pool(sample_pool(name)))
    after = templates(build_pool(sample_pool(name, credentials=other)))
    changed = {workload for workload in before if before[workload] != after[workload]}
    assert changed == ({"hub-router"} if name == "hub" else set())


def test_redis_gets_a_hash_of_the_password() -> None:
    [values] = secret_values([build_secret(sample_pool("sim"))]).values()
    digest = hashlib.sha256(CREDENTIALS.redis_password.encode()).hexdigest()
    assert values["users.acl"] == f"user default on #{digest} ~* &* +@all\n"
    assert CREDENTIALS.redis_password not in values["users.acl"]


@pytest.mark.parametrize(
    "damage",
    [
        {"link-token": None},
        {"redis-password": ""},
        {"redis-password": encoded("short")},
        {"redis-password": encoded("z" * 64)},
        {"link-token": encoded("a" * 64 + "\n")},
        {"link-token": "not base64!"},
        {"link-token": "\N{SNOWMAN}"},
        {"link-token": 5},
    ],
)
def test_a_damaged_secret_holds_no_credentials(damage: dict[str, Any]) -> None:
    secret = build_secret(sample_pool("sim"))
    secret["data"] |= damage
    assert credentials_of(secret, unasked) is None


@pytest.mark.parametrize("secret", [None, {}, {"data": None}, {"data": {}}])
def test_no_secret_holds_no_credentials(secret: dict[str, Any] | None) -> None:
    assert credentials_of(secret, unasked) is None


@pytest.mark.parametrize("name", SAMPLES)
def test_no_manifest_but_the_secret_holds_a_secret_value(name: str) -> None:
    manifests = build_pool(sample_pool(name))
    [values] = secret_values(manifests).values()
    words = [*words_of(CREDENTIALS), *values.values()]
    [secret, *others] = manifests
    assert secret["kind"] == "Secret"
    assert encoded(words[0]) in yaml.safe_dump(secret, width=1000)
    text = yaml.safe_dump_all(others, width=1000)
    for word in words:
        assert word.strip() not in text
        assert encoded(word) not in text
        assert hashlib.sha256(word.encode()).hexdigest() not in text


@pytest.mark.parametrize("name", SAMPLES)
def test_other_credentials_are_other_pods_of_every_kind(name: str) -> None:
    other = new_credentials(os.urandom)
    for before, after in zip(
        build_pool(sample_pool(name)), build_pool(sample_pool(name, credentials=other)), strict=True
    ):
        if "template" in before.get("spec", {}):
            assert before["spec"]["template"] != after["spec"]["template"]


def test_credentials_do_not_show_themselves() -> None:
    for text in (repr(CREDENTIALS), str(sample_pool("sim"))):
        assert not [word for word in words_of(CREDENTIALS) if word in text]
