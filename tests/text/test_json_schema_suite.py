"""The JSON Schema test-suite: a grammar refuses a schema by name, or lets no instance through that
the suite calls invalid.

The suite travels in the source archive of `jsonschema`. A grammar writes properties in the schema's
order and integers without a point, so it is narrower than its schema: what is valid and yet cannot
be generated is counted apart, and only for these reasons.
"""

from __future__ import annotations

import json
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
from baton_text.grammar import GrammarError, Grammars, grammar_of
from baton_text.tokenizer import Tokenizer
from tests.support.needs import needs

pytestmark = pytest.mark.integration

PACKAGE = "jsonschema==4.26.0"
# Schemas that compile, schemas that are refused, and what becomes of the instances of the former.
COUNTS = {
    "draft7": {
        "compiled": 160,
        "refused": 94,
        "valid and accepted": 302,
        "valid in another order": 3,
        "valid and narrower": 10,
        "invalid and refused": 234,
    },
    "draft2020-12": {
        "compiled": 164,
        "refused": 204,
        "valid and accepted": 330,
        "valid in another order": 3,
        "valid and narrower": 19,
        "invalid and refused": 237,
    },
}
META = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs("registry")
    folder = tmp_path_factory.mktemp("suite")
    asked = ("--quiet", "--no-deps", "--no-binary=jsonschema", f"--dest={folder}")
    command = [sys.executable, "-m", "pip", "download", *asked, PACKAGE]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    [archive] = folder.glob("jsonschema-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return next(folder.glob("jsonschema-*/json/tests"))


@pytest.mark.parametrize("draft", COUNTS)
def test_what_compiles_lets_no_invalid_instance_through(suite: Path, draft: str) -> None:
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
                told = outcome(grammars, grammar, test["data"], test["valid"])
                counts[told] += 1
                if told == "invalid and accepted":
                    wrong.add((file.stem, group["description"]))
                elif told == "valid and narrower":
                    narrower.append((file.stem, test["data"]))
    assert wrong == set()
    assert [each for each in narrower if not narrower_for_a_reason(*each)] == []
    assert counts == COUNTS[draft]


def declared(draft: str, schema: Any) -> Any:
    """The schema with its draft named, where it is an object."""
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
    """The same value with its properties in other orders."""
    if isinstance(value, dict) and len(value) <= 5:
        for keys in permutations(value):
            for values in product(*(list(islice(in_each_order(value[key]), 24)) for key in keys)):
                yield dict(zip(keys, values, strict=True))
    elif isinstance(value, list) and len(value) <= 4:
        yield from map(list, product(*(list(islice(in_each_order(each), 24)) for each in value)))
    else:
        yield value


def narrower_for_a_reason(file: str, instance: Any) -> bool:
    """An integer is written without a point; a format is kept, where the suite only notes it; and
    draft 7 ignores what stands beside a $ref, where a grammar keeps it."""
    [value] = instance if isinstance(instance, list) and len(instance) == 1 else [instance]
    whole = isinstance(value, float) and value.is_integer()
    return whole or file in ("format", "ref")
