"""On every path a request gets the bits that it gets alone on an engine.

Ids and float32 log-probabilities are compared as integers. Each test is a model in a dtype on a
path. `make test` runs each model, dtype and path in some test, and `make test-long` all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import pytest

from tests.bits.cells import DTYPES, MODELS, SUBJECTS, Bench, Differs, ids_in, run
from tests.bits.origin import first_difference
from tests.bits.paths import PATHS
from tests.bits.store_paths import STORE_PATHS
from tests.support.needs import needs

ALL_PATHS: Mapping[str, Callable[[Bench], None]] = {**PATHS, **STORE_PATHS}
SMOKE = list(
    islice(zip(cycle(MODELS), cycle(DTYPES), cycle(ALL_PATHS)), max(len(MODELS), len(ALL_PATHS)))
)

# KV in 8 bits: the same models on the same paths, of which `make test` runs one.
EIGHT_BITS = [(*each, code) for code in ("int8", "fp8") for each in SMOKE]
QUICK_EIGHT_BITS = ("llama-head64", "bfloat16", "handed off", "int8")
# KV that is rounded for the store's codec: the same models on the same paths, of which `make test`
# runs a hand-off and a lost node.
QUICK_CODEC = [("llama-gqa4", "bfloat16", "handed off"), ("llama-head64", "bfloat16", "node lost")]


def marks_of(path: str) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.integration,) if path in STORE_PATHS else ()


def check(bench: Bench, path: str) -> None:
    try:
        ALL_PATHS[path](bench)
    except Differs as differs:
        differs.add_note(origin_of(bench, path, differs))
        raise


def origin_of(bench: Bench, path: str, differs: Differs) -> str:
    """Repeat the path on engines that record their hidden states, and find the first difference."""
    alone, again = replace(bench, origins=[]), replace(bench, origins=[])
    known = [*differs.subject.prompt, *ids_in(alone.expected(differs.subject, differs.choice))]
    again.alone = alone.alone
    try:
        ALL_PATHS[path](again)
    except Differs:
        assert alone.origins is not None
        assert again.origins is not None
        return first_difference(
            alone.origins[SUBJECTS.index(differs.subject)], again.origins, known
        )
    return "a repetition shows no difference"


def test_the_smoke_has_each_model_each_dtype_and_each_path() -> None:
    models, dtypes, paths = (set(each) for each in zip(*SMOKE, strict=True))
    assert (models, dtypes, paths) == (set(MODELS), set(DTYPES), set(ALL_PATHS))


@pytest.fixture
def bench_of(
    tiny_model: Callable[[str], Path], request: pytest.FixtureRequest
) -> Callable[..., Bench]:
    """(model, dtype, path, device) -> its bench, with a store if the path needs one."""

    def make(model: str, dtype: str, path: str, device: str = "cpu") -> Bench:
        store = request.getfixturevalue("store") if path in STORE_PATHS else None
        return Bench(tiny_model(model), dtype, store, device)

    return make


@pytest.mark.shows("bitwise")
@pytest.mark.parametrize(
    ("model", "dtype", "path"), [pytest.param(*each, marks=marks_of(each[2])) for each in SMOKE]
)
def test_a_request_has_the_bits_that_it_has_alone(
    model: str, dtype: str, path: str, bench_of: Callable[..., Bench]
) -> None:
    check(replace(bench_of(model, dtype, path), thorough=False), path)


@pytest.mark.shows("bitwise")
@pytest.mark.parametrize(
    ("model", "dtype", "path", "code"),
    [pytest.param(*QUICK_EIGHT_BITS, marks=marks_of("handed off"))]
    + [pytest.param(*each, marks=(pytest.mark.long, *marks_of(each[2]))) for each in EIGHT_BITS],
)
def test_kv_in_8_bits_gives_a_request_the_bits_that_it_has_alone(
    model: str, dtype: str, path: str, code: str, bench_of: Callable[..., Bench]
) -> None:
    check(replace(bench_of(model, dtype, path), thorough=False, kv_cache_dtype=code), path)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("llama-head64", "bfloat16"),
        pytest.param("deepseek-v3", "float32", marks=pytest.mark.long),
        pytest.param("gpt-oss", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_a_cache_of_codes_gives_the_bits_of_a_store_of_codes(
    model: str, dtype: str, tiny_model: Callable[[str], Path]
) -> None:
    cache = Bench(tiny_model(model), dtype, kv_cache_dtype="int8")
    engine = Bench(tiny_model(model), dtype).engine(store_codec="int8")
    cache.check_all("codes in the store", run(engine, [each.request() for each in SUBJECTS]))


@pytest.mark.shows("bitwise")
@pytest.mark.parametrize(
    ("model", "dtype", "path"),
    [pytest.param(*each, marks=marks_of(each[2])) for each in QUICK_CODEC]
    + [pytest.param(*each, marks=(pytest.mark.long, *marks_of(each[2]))) for each in SMOKE],
)
def test_a_codec_of_the_store_gives_a_request_the_bits_that_it_has_alone(
    model: str, dtype: str, path: str, bench_of: Callable[..., Bench]
) -> None:
    check(replace(bench_of(model, dtype, path), thorough=False, store_codec="int8"), path)


@pytest.mark.long
@pytest.mark.parametrize("path", [pytest.param(p, marks=marks_of(p)) for p in ALL_PATHS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_request_has_the_bits_that_it_has_alone_on_every_path(
    device: str, model: str, dtype: str, path: str, bench_of: Callable[..., Bench]
) -> None:
    if device == "cuda":
        needs("gpu")
    check(bench_of(model, dtype, path, device), path)
