"""Each sampling parameter does what it says, through the official client and a disaggregated pool.

The simulated engine says printable ASCII, one character per id, and here an EOS about every tenth
token. Answers are greedy and go past EOS unless a test says otherwise.
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
        openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


@dataclass
class ChoiceResult:
    """One choice, whole or put together from a stream."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    stop: Any = None
    tops: list[int] = field(default_factory=list)  # how many alternatives each position has

    def add(self, choice: Any, text: str | None) -> None:
        self.ids += choice.token_ids
        self.text += text or ""
        self.finish = choice.finish_reason or self.finish
        self.stop = getattr(choice, "stop_reason", None) or self.stop
        if choice.logprobs is not None:
            told = getattr(choice.logprobs, "content", None)
            tops = choice.logprobs.top_logprobs if told is None else [t.top_logprobs for t in told]
            self.tops += map(len, tops)


Ask = Callable[..., list[ChoiceResult]]


@pytest.fixture(params=["chat", "chat-stream", "completions", "completions-stream"])
def ask(request: pytest.FixtureRequest, client: openai.OpenAI) -> Ask:
    """Fields of a request to the choices of its answer, on both endpoints, streamed and not."""
    endpoint, _, stream = request.param.partition("-")

    def asked(**fields: Any) -> list[ChoiceResult]:
        fields = {"max_tokens": 40, "temperature": 0, "ignore_eos": True} | fields
        create: Any = client.completions.create
        prompt: dict[str, Any] = {"prompt": PROMPT}
        if endpoint == "chat":
            create = client.chat.completions.create
            prompt = {"messages": [{"role": "user", "content": PROMPT}]}
            if "logprobs" in fields:
                fields |= {"top_logprobs": fields["logprobs"], "logprobs": True}
        extra = {"return_token_ids": True, **fields}
        answer = create(model="sim", stream=bool(stream), **prompt, extra_body=extra)
        choices = [ChoiceResult() for _ in range(fields.get("n", 1))]
        for part in answer if stream else [answer]:
            for choice in part.choices:
                shown = getattr(choice, "delta" if stream else "message", None)
                text = choice.text if shown is None else shown.content
                choices[choice.index].add(choice, text)
        return choices

    return asked


def shown(ids: list[int]) -> str:
    """EOS shows as nothing."""
    return "".join(chr(token) for token in ids if token != EOS)


def a_word(ids: list[int]) -> tuple[str, int]:
    """Three characters that stand side by side somewhere in the middle, and how many ids there are
    when they are first complete."""
    start = next(i for i in range(8, len(ids) - 3) if EOS not in ids[i : i + 3])
    word = shown(ids[start : start + 3])
    return word, next(end for end in range(len(ids)) if shown(ids[:end]).endswith(word))


def first_repeat(ids: list[int], before: list[int] | None = None) -> int:
    """Where an id comes that was there already."""
    seen = set(before or [])
    for place, token in enumerate(ids):
        if token in seen:
            return place
        seen.add(token)
    raise AssertionError(f"no id of {ids} repeats")


def test_a_continued_message_goes_on_as_its_prompt_would(client: openai.OpenAI) -> None:
    """The chat's prompt, sent as ids, is answered with the same tokens and the same text."""
    extra = {"return_token_ids": True, "temperature": 0, "ignore_eos": True}
    begun: Any = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": "It has a "},
    ]
    chat: Any = client.chat.completions.create(
        model="sim",
        messages=begun,
        max_tokens=20,
        extra_body=extra | {"continue_final_message": True, "echo": True},
    )
    plain: Any = client.completions.create(
        model="sim", prompt=chat.prompt_token_ids, max_tokens=20, extra_body=extra
    )
    assert bytes(chat.prompt_token_ids[-9:]) == b"It has a "
    assert chat.choices[0].token_ids == plain.choices[0].token_ids
    assert chat.choices[0].message.content == "It has a " + plain.choices[0].text


def test_a_cut_prompt_is_the_prompt_that_is_left_of_it_to_caches_too(
    client: openai.OpenAI,
) -> None:
    """Blocks are named by what is kept, whatever stood before it."""
    extra = {"return_token_ids": True, "temperature": 0, "ignore_eos": True}
    rest = "what is kept of a prompt " * 8

    def ask_about(prompt: str, **more: Any) -> Any:
        return client.completions.create(
            model="sim", prompt=prompt, max_tokens=8, extra_body=extra | more
        )

    cut = ask_about("what is cut off " * 9 + rest, truncate_prompt_tokens=len(rest))
    whole = ask_about(rest)
    other = ask_about("something else is " * 7 + rest, truncate_prompt_tokens=len(rest))
    assert cut.choices[0].prompt_token_ids == whole.choices[0].prompt_token_ids
    assert cut.choices[0].token_ids == whole.choices[0].token_ids == other.choices[0].token_ids
    for answer in (whole, other):
        assert answer.usage.prompt_tokens == len(rest)
        assert answer.usage.prompt_tokens_details.cached_tokens >= len(rest) // 16 * 16 - 16


def test_a_bias_forces_a_token(ask: Ask) -> None:
    [said] = ask(logit_bias={str(ord("X")): 100})
    assert said.text == "X" * 40


def test_a_bias_bans_a_token(ask: Ask) -> None:
    [free] = ask()
    [said] = ask(logit_bias={str(free.ids[3]): -100})
    assert said.ids[:3] == free.ids[:3]
    assert free.ids[3] not in said.ids


def test_only_allowed_tokens_are_said(ask: Ask) -> None:
    [said] = ask(allowed_token_ids=[ord("0"), ord("p")])
    assert set(said.text) == {"0", "p"}
    assert len(said.text) == 40


def test_a_bad_word_is_not_completed(ask: Ask) -> None:
    [free] = ask()
    word, end = a_word(free.ids)
    [said] = ask(bad_words=[word])
    assert said.ids[: end - 1] == free.ids[: end - 1]
    assert said.ids[end - 1] != free.ids[end - 1]
    assert word not in said.text


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 2}, {"presence_penalty": 2}])
def test_a_penalty_keeps_an_id_from_coming_twice(ask: Ask, penalty: dict[str, Any]) -> None:
    [free] = ask()
    [said] = ask(**penalty)
    place = first_repeat(free.ids)
    assert said.ids[:place] == free.ids[:place]
    assert said.ids[place] != free.ids[place]


def test_a_repetition_penalty_looks_at_the_prompt_too(ask: Ask) -> None:
    [free] = ask()
    [said] = ask(repetition_penalty=10)
    place = first_repeat(free.ids, [ord(char) for char in PROMPT])
    assert said.ids[:place] == free.ids[:place]
    assert said.ids[place] != free.ids[place]


def test_eos_ends_an_answer_after_the_fewest_tokens(ask: Ask) -> None:
    [free] = ask(ignore_eos=False, max_tokens=200)
    assert (free.finish, free.ids[-1]) == ("stop", EOS)
    fewest = len(free.ids) + 5
    [said] = ask(ignore_eos=False, max_tokens=200, min_tokens=fewest)
    assert len(said.ids) > fewest - 1
    assert EOS not in said.ids[: fewest - 1]


def test_eos_can_be_ignored_and_spelled(ask: Ask) -> None:
    [hidden] = ask(max_tokens=100)
    [spelled] = ask(max_tokens=100, skip_special_tokens=False)
    assert hidden.finish == "length"
    assert hidden.ids == spelled.ids
    assert EOS in hidden.ids
    assert hidden.text == shown(hidden.ids)
    assert len(spelled.text) > 100


def test_the_first_stop_string_of_a_list_ends_the_text(ask: Ask) -> None:
    [free] = ask()
    word, end = a_word(free.ids)
    [said] = ask(stop=["\n\n", word])
    assert (said.ids, said.finish, said.stop) == (free.ids[:end], "stop", word)
    assert said.text == shown(free.ids[:end]).removesuffix(word)
    [kept] = ask(stop=word, include_stop_str_in_output=True)
    assert kept.text == shown(free.ids[:end])


def test_a_stop_token_ends_the_answer_unseen(ask: Ask) -> None:
    [free] = ask()
    token = ord(a_word(free.ids)[0][0])
    [said] = ask(stop_token_ids=[token])
    place = free.ids.index(token)
    assert (said.ids, said.stop) == (free.ids[: place + 1], token)
    assert said.text == shown(free.ids[:place])


def test_choices_differ_and_a_seed_repeats_them(ask: Ask) -> None:
    first, again = (ask(n=3, temperature=1, seed=7) for _ in range(2))
    assert len({tuple(said.ids) for said in first}) == 3
    assert [said.ids for said in first] == [said.ids for said in again]
    [other] = ask(temperature=1, seed=8)
    assert other.ids != first[0].ids


def test_without_text_there_are_the_same_ids(ask: Ask) -> None:
    [said], [silent] = ask(), ask(detokenize=False)
    assert (silent.ids, silent.finish) == (said.ids, "length")
    assert said.text
    assert silent.text == ""


@pytest.mark.parametrize("count", [0, 1, 20])
def test_each_token_has_as_many_alternatives_as_were_asked_for(ask: Ask, count: int) -> None:
    [said] = ask(logprobs=count, max_tokens=8)
    # A completion's have the sampled token among them; greedy sampled the likeliest.
    assert said.tops in ([count] * 8, [max(1, count)] * 8)


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    """The one choice of a completion."""
    extra = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(model="sim", prompt=prompt, extra_body=extra | fields)
    return answer.choices[0]


def test_a_prompts_logprobs_are_those_its_tokens_were_said_with(client: openai.OpenAI) -> None:
    said = complete(client, PROMPT, max_tokens=8, logprobs=0)
    whole = [*said.prompt_token_ids, *said.token_ids]
    scored = complete(client, whole, max_tokens=0, echo=True, logprobs=0)
    assert scored.text == PROMPT + said.text
    assert scored.token_ids == []
    assert len(scored.logprobs.tokens) == len(whole)
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[-8:] == pytest.approx(said.logprobs.token_logprobs)


def test_an_echo_streams_what_it_says_in_one_piece(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"max_tokens": 8, "echo": True, "logprobs": 2}
    whole = complete(client, PROMPT, **asked)
    extra = {"temperature": 0, "ignore_eos": True, **asked}
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


def test_prompt_logprobs_hold_each_token_of_the_prompt(client: openai.OpenAI) -> None:
    told = complete(client, PROMPT, max_tokens=1, prompt_logprobs=3)
    assert len(told.prompt_logprobs) == len(PROMPT)
    assert told.prompt_logprobs[0] is None
    for char, top in zip(PROMPT[1:], told.prompt_logprobs[1:], strict=True):
        assert top[str(ord(char))]["decoded_token"] == char
        assert sorted(entry["rank"] for entry in top.values())[:3] == [1, 2, 3]
    chat: Any = client.chat.completions.create(
        model="sim",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=1,
        extra_body={"prompt_logprobs": 0, "return_token_ids": True},
    )
    held = [[int(id) for id in top] for top in chat.prompt_logprobs[1:]]
    assert held == [[id] for id in chat.prompt_token_ids[1:]]


def test_usage_counts_what_was_cached(client: openai.OpenAI) -> None:
    for _ in range(2):
        answer = client.completions.create(model="sim", prompt="twice " * 20, max_tokens=4)
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert 0 < (usage.prompt_tokens_details.cached_tokens or 0) < usage.prompt_tokens == 120
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
