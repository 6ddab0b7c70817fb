"""Random schemas on random weights: an answer that ends by itself parses, has no key twice and
validates by another implementation; a refusal is one sentence."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence

import jsonschema_rs
import pytest

from baton_text.grammars.constraints import grammar_of
from baton_text.grammars.errors import GrammarError
from baton_text.grammars.grammars import Grammars
from tests.support.engines.random_schemas import (
    one_of_each_key,
    random_answer,
    random_schema,
)
from tests.support.engines.text_models import json_tokenizer

MOST_TOKENS = 300
FEW, ALL = range(150), range(150, 2000)


def check(seeds: Sequence[int], answers: int) -> Counter[str]:
    """Check some answers for the schema of each seed; return how often each outcome occurred."""
    tokenizer = json_tokenizer()
    grammars, outcomes = Grammars(tokenizer), Counter[str]()
    closing = frozenset(
        id
        for id in range(tokenizer.vocab_size)
        if id not in tokenizer.special_ids and set(tokenizer.decode([id])) <= set('"}], ')
    )
    for seed in seeds:
        rng = random.Random(seed)
        schema = random_schema(rng)
        try:
            grammar = grammar_of("json", schema)
            grammars.check(grammar)
        except GrammarError as error:
            reason = str(error)
            assert not any(raw in reason for raw in ("\n", "<")), (seed, reason)
            assert len(reason) < 400
            outcomes[f"refused: {reason.rpartition(': ')[2][:40]}"] += 1
            continue
        outcomes["accepted"] += 1
        validator = jsonschema_rs.validator_for(schema, validate_formats=True)
        for _ in range(answers):
            ids, end = random_answer(
                grammars.matcher(grammar), rng, closing, frozenset(tokenizer.eos_ids), MOST_TOKENS
            )
            outcomes[end] += 1
            text = tokenizer.decode(ids)
            assert end != "error", (seed, schema, text)
            if end == "stop":
                value = json.loads(text, object_pairs_hook=one_of_each_key)
                assert validator.is_valid(value), (seed, schema, text)
    return outcomes


def test_answers_of_random_schemas_match_and_have_no_key_twice() -> None:
    outcomes = check(FEW, answers=1)
    assert outcomes["accepted"] >= 60
    assert outcomes["stop"] >= 50


@pytest.mark.long
def test_answers_of_all_random_schemas_match_and_have_no_key_twice() -> None:
    outcomes = check(ALL, answers=3)
    print(dict(outcomes.most_common()))
    assert outcomes["accepted"] >= 800
    assert outcomes["stop"] >= 2000
