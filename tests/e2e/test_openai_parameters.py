"""Each sampling parameter has its effect, through the official client and a disaggregated pool.

The simulated engine generates printable ASCII, one character per id, and here an EOS about every
tenth token. Requests are greedy and ignore EOS unless a test changes that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from tests.support.pools.baton_up import Pool

PROMPT = "every chunk of the cache has a name " * 4
EOS = 257


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    flags = ["--engine", "sim", "--prefill", "1", "--decode", "1", "--sim-eos-every", "10"]
    with (
        Pool([*flags, "--handoff", "always", "--chunk-blocks", "1"]) as pool,
        openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api


@dataclass
class ChoiceResult:
    """One choice, unstreamed or put together from a stream."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    stop: Any = None
    tops: list[int] = field(default_factory=list)  # number of alternatives at each position

    def add(self, choice: Any, text: str | None) -> None:
        self.ids += choice.token_ids
        self.text += text or ""
        self.finish = choice.finish_reason or self.finish
        self.stop = getattr(choice, "stop_reason", None) or self.stop
        if choice.logprobs is not None:
            content = getattr(choice.logprobs, "content", None)
            tops = (
                choice.logprobs.top_logprobs
                if content is None
                else [each.top_logprobs for each in content]
            )
            self.tops += map(len, tops)


Generate = Callable[..., list[ChoiceResult]]


@pytest.fixture(params=["chat", "chat-stream", "completions", "completions-stream"])
def generate(request: pytest.FixtureRequest, client: openai.OpenAI) -> Generate:
    """Sends a request with these fields and returns the choices, for both endpoints, with and
    without streaming."""
    endpoint, _, stream = request.param.partition("-")

    def send(**fields: Any) -> list[ChoiceResult]:
        fields = {"max_tokens": 40, "temperature": 0, "ignore_eos": True} | fields
        create: Any = client.completions.create
        prompt: dict[str, Any] = {"prompt": PROMPT}
        if endpoint == "chat":
            create = client.chat.completions.create
            prompt = {"messages": [{"role": "user", "content": PROMPT}]}
            if "logprobs" in fields:
                fields |= {"top_logprobs": fields["logprobs"], "logprobs": True}
        extra = {"return_token_ids": True, **fields}
        response = create(model="sim", stream=bool(stream), **prompt, extra_body=extra)
        choices = [ChoiceResult() for _ in range(fields.get("n", 1))]
        for part in response if stream else [response]:
            for choice in part.choices:
                message = getattr(choice, "delta" if stream else "message", None)
                text = choice.text if message is None else message.content
                choices[choice.index].add(choice, text)
        return choices

    return send


def text_of(ids: list[int]) -> str:
    """The text of these ids, in which EOS is empty."""
    return "".join(chr(token) for token in ids if token != EOS)


def word_of(ids: list[int]) -> tuple[str, int]:
    """Three consecutive characters, and the number of ids after which they first are complete."""
    start = next(i for i in range(8, len(ids) - 3) if EOS not in ids[i : i + 3])
    word = text_of(ids[start : start + 3])
    return word, next(end for end in range(len(ids)) if text_of(ids[:end]).endswith(word))


def first_repeat(ids: list[int], before: list[int] | None = None) -> int:
    """The index of the first id that occurred earlier."""
    seen = set(before or [])
    for index, token in enumerate(ids):
        if token in seen:
            return index
        seen.add(token)
    raise AssertionError(f"no id of {ids} repeats")


def test_a_continued_message_gives_the_same_output_as_its_prompt(client: openai.OpenAI) -> None:
    """The chat's prompt ids, sent as a completion, give the same ids and text."""
    extra = {"return_token_ids": True, "temperature": 0, "ignore_eos": True}
    messages: Any = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": "It has a "},
    ]
    chat: Any = client.chat.completions.create(
        model="sim",
        messages=messages,
        max_tokens=20,
        extra_body=extra | {"continue_final_message": True, "echo": True},
    )
    plain: Any = client.completions.create(
        model="sim", prompt=chat.prompt_token_ids, max_tokens=20, extra_body=extra
    )
    assert bytes(chat.prompt_token_ids[-9:]) == b"It has a "
    assert chat.choices[0].token_ids == plain.choices[0].token_ids
    assert chat.choices[0].message.content == "It has a " + plain.choices[0].text


def test_a_truncated_prompt_has_the_ids_and_cached_blocks_of_the_kept_part(
    client: openai.OpenAI,
) -> None:
    """Block hashes depend only on the part that is kept."""
    extra = {"return_token_ids": True, "temperature": 0, "ignore_eos": True}
    kept = "what is kept of a prompt " * 8

    def complete_prompt(prompt: str, **more: Any) -> Any:
        return client.completions.create(
            model="sim", prompt=prompt, max_tokens=8, extra_body=extra | more
        )

    cut = complete_prompt("what is cut off " * 9 + kept, truncate_prompt_tokens=len(kept))
    whole = complete_prompt(kept)
    other = complete_prompt("something else is " * 7 + kept, truncate_prompt_tokens=len(kept))
    assert cut.choices[0].prompt_token_ids == whole.choices[0].prompt_token_ids
    assert cut.choices[0].token_ids == whole.choices[0].token_ids == other.choices[0].token_ids
    for response in (whole, other):
        assert response.usage.prompt_tokens == len(kept)
        assert response.usage.prompt_tokens_details.cached_tokens >= len(kept) // 16 * 16 - 16


def test_a_logit_bias_forces_a_token(generate: Generate) -> None:
    [result] = generate(logit_bias={str(ord("X")): 100})
    assert result.text == "X" * 40


def test_a_logit_bias_bans_a_token(generate: Generate) -> None:
    [free] = generate()
    [result] = generate(logit_bias={str(free.ids[3]): -100})
    assert result.ids[:3] == free.ids[:3]
    assert free.ids[3] not in result.ids


def test_only_allowed_tokens_are_generated(generate: Generate) -> None:
    [result] = generate(allowed_token_ids=[ord("0"), ord("p")])
    assert set(result.text) == {"0", "p"}
    assert len(result.text) == 40


def test_a_bad_word_is_not_generated(generate: Generate) -> None:
    [free] = generate()
    word, end = word_of(free.ids)
    [result] = generate(bad_words=[word])
    assert result.ids[: end - 1] == free.ids[: end - 1]
    assert result.ids[end - 1] != free.ids[end - 1]
    assert word not in result.text


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 2}, {"presence_penalty": 2}])
def test_a_penalty_prevents_the_first_repeated_id(
    generate: Generate, penalty: dict[str, Any]
) -> None:
    [free] = generate()
    [result] = generate(**penalty)
    index = first_repeat(free.ids)
    assert result.ids[:index] == free.ids[:index]
    assert result.ids[index] != free.ids[index]


def test_a_repetition_penalty_includes_the_prompt(generate: Generate) -> None:
    [free] = generate()
    [result] = generate(repetition_penalty=10)
    index = first_repeat(free.ids, [ord(char) for char in PROMPT])
    assert result.ids[:index] == free.ids[:index]
    assert result.ids[index] != free.ids[index]


def test_eos_finishes_an_output_only_after_min_tokens(generate: Generate) -> None:
    [free] = generate(ignore_eos=False, max_tokens=200)
    assert (free.finish, free.ids[-1]) == ("stop", EOS)
    least_tokens = len(free.ids) + 5
    [result] = generate(ignore_eos=False, max_tokens=200, min_tokens=least_tokens)
    assert len(result.ids) > least_tokens - 1
    assert EOS not in result.ids[: least_tokens - 1]


def test_eos_can_be_ignored_and_shown_in_the_text(generate: Generate) -> None:
    [without_special] = generate(max_tokens=100)
    [with_special] = generate(max_tokens=100, skip_special_tokens=False)
    assert without_special.finish == "length"
    assert without_special.ids == with_special.ids
    assert EOS in without_special.ids
    assert without_special.text == text_of(without_special.ids)
    assert len(with_special.text) > 100


def test_the_first_stop_string_of_a_list_ends_the_text(generate: Generate) -> None:
    [free] = generate()
    word, end = word_of(free.ids)
    [result] = generate(stop=["\n\n", word])
    assert (result.ids, result.finish, result.stop) == (free.ids[:end], "stop", word)
    assert result.text == text_of(free.ids[:end]).removesuffix(word)
    [kept] = generate(stop=word, include_stop_str_in_output=True)
    assert kept.text == text_of(free.ids[:end])


def test_a_stop_token_finishes_the_output_and_is_not_in_the_text(generate: Generate) -> None:
    [free] = generate()
    token = ord(word_of(free.ids)[0][0])
    [result] = generate(stop_token_ids=[token])
    index = free.ids.index(token)
    assert (result.ids, result.stop) == (free.ids[: index + 1], token)
    assert result.text == text_of(free.ids[:index])


def test_choices_differ_and_are_reproducible_with_a_seed(generate: Generate) -> None:
    first, again = (generate(n=3, temperature=1, seed=7) for _ in range(2))
    assert len({tuple(result.ids) for result in first}) == 3
    assert [result.ids for result in first] == [result.ids for result in again]
    [other] = generate(temperature=1, seed=8)
    assert other.ids != first[0].ids


def test_without_detokenize_the_ids_are_the_same(generate: Generate) -> None:
    [result], [no_text] = generate(), generate(detokenize=False)
    assert (no_text.ids, no_text.finish) == (result.ids, "length")
    assert result.text
    assert no_text.text == ""


@pytest.mark.parametrize("count", [0, 1, 20])
def test_each_token_has_the_requested_number_of_alternatives(
    generate: Generate, count: int
) -> None:
    [result] = generate(logprobs=count, max_tokens=8)
    # A completion's alternatives include the sampled token, here the likeliest.
    assert result.tops in ([count] * 8, [max(1, count)] * 8)


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    """The only choice of a completion."""
    extra = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = client.completions.create(model="sim", prompt=prompt, extra_body=extra | fields)
    return response.choices[0]


def test_echoed_prompt_logprobs_equal_those_of_the_generated_tokens_on_sim(
    client: openai.OpenAI,
) -> None:
    result = complete(client, PROMPT, max_tokens=8, logprobs=0)
    whole = [*result.prompt_token_ids, *result.token_ids]
    scored = complete(client, whole, max_tokens=0, echo=True, logprobs=0)
    assert scored.text == PROMPT + result.text
    assert scored.token_ids == []
    assert len(scored.logprobs.tokens) == len(whole)
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[-8:] == pytest.approx(result.logprobs.token_logprobs)


def test_a_streamed_echo_equals_the_unstreamed_one(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"max_tokens": 8, "echo": True, "logprobs": 2}
    whole = complete(client, PROMPT, **fields)
    extra = {"temperature": 0, "ignore_eos": True, **fields}
    text, tokens, values = "", [], []
    for event in client.completions.create(
        model="sim", prompt=PROMPT, stream=True, extra_body=extra
    ):
        [choice] = event.choices
        text += choice.text
        assert choice.logprobs is not None
        tokens += choice.logprobs.tokens or []
        values += choice.logprobs.token_logprobs or []
    assert (text, tokens) == (whole.text, whole.logprobs.tokens)
    assert values == whole.logprobs.token_logprobs
    assert len(tokens) == len(PROMPT) + 8


def test_prompt_logprobs_include_each_token_of_the_prompt(client: openai.OpenAI) -> None:
    completion = complete(client, PROMPT, max_tokens=1, prompt_logprobs=3)
    assert len(completion.prompt_logprobs) == len(PROMPT)
    assert completion.prompt_logprobs[0] is None
    for char, top in zip(PROMPT[1:], completion.prompt_logprobs[1:], strict=True):
        assert top[str(ord(char))]["decoded_token"] == char
        assert sorted(entry["rank"] for entry in top.values())[:3] == [1, 2, 3]
    chat: Any = client.chat.completions.create(
        model="sim",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=1,
        extra_body={"prompt_logprobs": 0, "return_token_ids": True},
    )
    prompt_ids = [[int(id) for id in top] for top in chat.prompt_logprobs[1:]]
    assert prompt_ids == [[id] for id in chat.prompt_token_ids[1:]]


def test_usage_counts_cached_tokens(client: openai.OpenAI) -> None:
    for _ in range(2):
        response = client.completions.create(model="sim", prompt="twice " * 20, max_tokens=4)
    usage = response.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert 0 < (usage.prompt_tokens_details.cached_tokens or 0) < usage.prompt_tokens == 120
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
