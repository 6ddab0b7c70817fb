"""The JSON Schema test suite: a grammar refuses a schema, or accepts no instance that the suite
calls invalid.

The suite is part of the source archive of `jsonschema`. A grammar is narrower than its schema,
because it writes properties in the schema's order and integers without a decimal point. The test
counts valid instances that are refused separately, and allows them only for known reasons.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import pytest

from baton_text.artifacts import BYTE_VOCAB_SIZE, byte_artifacts
from baton_text.grammars.constraints import grammar_of
from baton_text.grammars.errors import GrammarError
from baton_text.grammars.grammars import Grammars
from baton_text.tokenizer import Tokenizer
from tests.support.engines.tiny_models import CACHE
from tests.support.needs import needs

pytestmark = pytest.mark.integration

PACKAGE = "jsonschema==4.26.0"
# Numbers of compiled and refused schemas, and outcomes for the instances of the compiled ones.
COUNTS = {
    "draft7": {
        "compiled": 180,
        "refused": 74,
        "valid and accepted": 361,
        "valid in another order": 3,
        "valid and narrower": 10,
        "invalid and refused": 244,
    },
    "draft2020-12": {
        "compiled": 218,
        "refused": 150,
        "valid and accepted": 438,
        "valid in another order": 3,
        "valid and narrower": 19,
        "invalid and refused": 275,
    },
}
META = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


@pytest.fixture(scope="module")
def archive() -> Path:
    """The source archive. pip takes five seconds, so it is kept in the test cache."""
    folder = CACHE / PACKAGE
    if not folder.is_dir():
        needs("registry")
        draft = folder.with_suffix(f".{os.getpid()}")
        options = ("--quiet", "--no-deps", "--no-binary=jsonschema", f"--dest={draft}")
        command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        draft.replace(folder)
    [archive] = folder.iterdir()
    return archive


@pytest.fixture(scope="module")
def suite(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    with tarfile.open(archive) as files:
        # Python 3.11 has filters from its fourth patch on.
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        files.extractall(folder, **safely)
    return next(folder.glob("jsonschema-*/json/tests"))


@pytest.mark.parametrize("draft", COUNTS)
def test_a_compiled_schema_accepts_no_invalid_instance(suite: Path, draft: str) -> None:
    grammars = Grammars(Tokenizer.from_artifacts(byte_artifacts()), BYTE_VOCAB_SIZE)
    counts, wrong, narrower = Counter[str](), set[tuple[str, str]](), list[tuple[str, Any]]()
    for file in sorted((suite / draft).glob("*.json")):
        for group in json.loads(file.read_text()):
            try:
                grammar = grammar_of("json", declared(draft, group["schema"]))
                grammars.check(grammar)
            except GrammarError:
                counts["refused"] += 1
                continue
            counts["compiled"] += 1
            for test in group["tests"]:
                result = outcome(grammars, grammar, test["data"], test["valid"])
                counts[result] += 1
                if result == "invalid and accepted":
                    wrong.add((file.stem, group["description"]))
                elif result == "valid and narrower":
                    narrower.append((file.stem, test["data"]))
    assert wrong == set()
    assert [each for each in narrower if not narrower_for_a_reason(*each)] == []
    assert counts == COUNTS[draft]


def declared(draft: str, schema: Any) -> Any:
    """The schema with its draft in $schema, if the schema is an object."""
    return {"$schema": META[draft], **schema} if isinstance(schema, dict) else schema


def outcome(grammars: Grammars, grammar: str, instance: Any, valid: bool) -> str:
    def accepts(value: Any) -> bool:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        matcher = grammars.matcher(grammar)
        return matcher.accept(text.encode()) and matcher.complete

    if accepts(instance):
        return f"{'valid' if valid else 'invalid'} and accepted"
    if any(accepts(other) for other in islice(in_each_order(instance), 200)):
        return "valid in another order" if valid else "invalid and accepted"
    return "valid and narrower" if valid else "invalid and refused"


def in_each_order(value: Any) -> Iterator[Any]:
    """Yield the value with its properties in every order, up to a limit."""
    if isinstance(value, dict) and len(value) <= 5:
        for keys in permutations(value):
            for values in product(*(list(islice(in_each_order(value[key]), 24)) for key in keys)):
                yield dict(zip(keys, values, strict=True))
    elif isinstance(value, list) and len(value) <= 4:
        yield from map(list, product(*(list(islice(in_each_order(each), 24)) for each in value)))
    else:
        yield value


def narrower_for_a_reason(file: str, instance: Any) -> bool:
    """Whether a known difference explains that a grammar refuses a valid instance.

    A grammar writes integers without a decimal point, enforces formats, which the suite ignores,
    and enforces keywords beside a $ref, which draft 7 ignores."""
    [value] = instance if isinstance(instance, list) and len(instance) == 1 else [instance]
    whole = isinstance(value, float) and value.is_integer()
    return whole or file in ("format", "ref")
