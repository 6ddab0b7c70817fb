"""A pool's credentials: generated, kept in one Secret, read back, and visible nowhere else."""

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


def values_of(credentials: Credentials) -> tuple[str, ...]:
    return msgspec.structs.astuple(credentials)


def no_random(size: int) -> bytes:
    raise AssertionError("nothing is missing, so no random bytes are needed")


def test_new_credentials_are_distinct_and_have_64_hex_digits() -> None:
    made = new_credentials(os.urandom)
    assert [len(bytes.fromhex(value)) for value in values_of(made)] == [32, 32, 32]
    assert len({*values_of(made), *values_of(new_credentials(os.urandom))}) == 6


def test_all_credentials_come_from_the_random_source() -> None:
    numbers = itertools.count()
    made = new_credentials(lambda size: bytes([next(numbers)]) * size)
    assert values_of(made) == ("00" * 32, "01" * 32, "02" * 32)


def test_credentials_are_read_back_from_the_secret() -> None:
    assert credentials_of(build_secret(sample_pool("sim")), no_random) == CREDENTIALS


@pytest.mark.parametrize("damage", [None, encoded("short"), 5])
def test_a_missing_or_damaged_tenant_secret_is_generated_and_the_rest_is_kept(
    damage: Any,
) -> None:
    secret = build_secret(sample_pool("sim"))
    secret["data"]["tenant-secret"] = damage
    found = credentials_of(secret, lambda size: b"\x07" * size)
    assert found == msgspec.structs.replace(CREDENTIALS, tenant_secret="07" * 32)


def test_a_deleted_tenant_secret_is_restored_from_the_known_credentials() -> None:
    secret = build_secret(sample_pool("sim"))
    del secret["data"]["tenant-secret"]
    known = msgspec.structs.replace(CREDENTIALS, redis_password="08" * 32)
    assert credentials_of(secret, no_random, known) == CREDENTIALS


@pytest.mark.parametrize("name", SAMPLES)
def test_a_new_tenant_secret_replaces_only_routers_that_separate_tenants(name: str) -> None:
    other = msgspec.structs.replace(CREDENTIALS, tenant_secret="07" * 32)
    before = templates(build_pool(sample_pool(name)))
    after = templates(build_pool(sample_pool(name, credentials=other)))
    changed = {workload for workload in before if before[workload] != after[workload]}
    assert changed == ({"hub-router"} if name == "hub" else set())


def test_redis_gets_only_a_hash_of_the_password() -> None:
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
    assert credentials_of(secret, no_random) is None


@pytest.mark.parametrize("secret", [None, {}, {"data": None}, {"data": {}}])
def test_a_missing_or_empty_secret_holds_no_credentials(secret: dict[str, Any] | None) -> None:
    assert credentials_of(secret, no_random) is None


@pytest.mark.parametrize("name", SAMPLES)
def test_only_the_secret_holds_secret_values(name: str) -> None:
    manifests = build_pool(sample_pool(name))
    [values] = secret_values(manifests).values()
    hidden = [*values_of(CREDENTIALS), *values.values()]
    [secret, *others] = manifests
    assert secret["kind"] == "Secret"
    assert encoded(hidden[0]) in yaml.safe_dump(secret, width=1000)
    text = yaml.safe_dump_all(others, width=1000)
    for value in hidden:
        assert value.strip() not in text
        assert encoded(value) not in text
        assert hashlib.sha256(value.encode()).hexdigest() not in text


@pytest.mark.parametrize("name", SAMPLES)
def test_new_credentials_change_every_pod_template(name: str) -> None:
    other = new_credentials(os.urandom)
    for before, after in zip(
        build_pool(sample_pool(name)), build_pool(sample_pool(name, credentials=other)), strict=True
    ):
        if "template" in before.get("spec", {}):
            assert before["spec"]["template"] != after["spec"]["template"]


def test_the_text_of_credentials_and_pools_hides_the_values() -> None:
    for text in (repr(CREDENTIALS), str(sample_pool("sim"))):
        assert not [value for value in values_of(CREDENTIALS) if value in text]
