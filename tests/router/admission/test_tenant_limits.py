"""The limits file: accepted settings, and one-line errors for wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_router.admission.tenant_limits import TenantLimits, read_limits
from baton_router.errors import StartError


def write_limits(folder: Path, text: str) -> str:
    (folder / "tenants.toml").write_text(text)
    return str(folder / "tenants.toml")


def test_a_tenant_s_limits_come_from_its_table_the_file_s_defaults_or_the_built_in_ones(
    tmp_path: Path,
) -> None:
    text = "[defaults]\nrequests_per_minute = 60\n[tenants.acme]\nweight = 2\npriority = 10\n"
    limits = read_limits(write_limits(tmp_path, text + 'max_queued = 7\n[tenants."glo.bex"]\n'))
    defaults = TenantLimits(requests_per_minute=60)
    assert limits.of_tenant("acme") == TenantLimits(
        requests_per_minute=60, weight=2, priority=10, max_queued=7
    )
    assert limits.of_tenant("glo.bex") == limits.of_tenant("nobody") == defaults
    assert read_limits("").of_tenant("acme") == TenantLimits()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tenants.acme]\nweight = 0", "[tenants.acme]: weight is 0; it must be above 0"),
        ('[tenants.acme]\nweight = "2"', "[tenants.acme]: weight: Expected `float`, got `str`"),
        ("[tenants.acme]\nprioritty = 1", "[tenants.acme]: Object contains unknown field"),
        ("[tenants.acme]\npriority = 101", "priority is 101; use -100 to 100"),
        ("[defaults]\ntokens_per_minute = -1", "[defaults]: tokens_per_minute is -1; it must be 0"),
        ("[defaults]\nmax_call_sequences = 0", "max_call_sequences is 0; use 1 or more"),
        ("[defaults]\nburst_seconds = 0", "burst_seconds is 0; use above 0, up to 3600"),
        ("[tenant.acme]\nweight = 2", "Object contains unknown field `tenant`"),
        ("[tenants\n", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_place_and_the_value(
    tmp_path: Path, text: str, message: str
) -> None:
    path = write_limits(tmp_path, text)
    with pytest.raises(StartError) as caught:
        read_limits(path)
    assert str(caught.value).startswith(f"--tenants {path}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_an_error_that_names_it() -> None:
    with pytest.raises(StartError, match="--tenants /no/such/file: No such file"):
        read_limits("/no/such/file")
