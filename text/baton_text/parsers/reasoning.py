"""Read reasoning between two markers such as <think>...</think>, and count its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from baton_text.detokenizer import TextReader
from baton_text.parsers.parser import Parse, Pieces, Reader, ReasoningParser, Tools, as_pieces
from baton_text.parsers.source import Source
from baton_text.tokenizer import Tokenizer


def reasoned(parser: ReasoningParser, rest: Parse, *, with_calls: bool = False) -> Parse:
    """A parser that reads reasoning at the start of an answer, if any, and then `rest`.

    `with_calls`: `rest` reads calls, so the start of a call ends unclosed reasoning."""
    ends = (parser.end, parser.call) if with_calls and parser.call else (parser.end,)
    if parser.answer is not None:
        rest = _without(parser.answer, rest)

    def parse(source: Source, tools: Tools) -> Pieces:
        space = yield from source.skip_space()
        if (yield from source.starts_with(parser.begin)) is None:
            source.put_back(space)
        else:
            start = source.place
            yield from source.skip_space()
            if (yield from source.starts_with(parser.begin)):  # some repeat the prompt's
                start = source.place
                yield from source.skip_space()
            end = yield from as_pieces("reasoning", source.until(*ends, trim=True))
            source.note_reasoning(start, end)
            if end == parser.call:
                source.put_back(end or "")
            yield from source.skip_space()
        yield from rest(source, tools)

    return parse


def _without(markers: tuple[str, ...], rest: Parse) -> Parse:
    """A parser that gives `rest` the text without `markers` and the white space around them."""

    def parse(source: Source, tools: Tools) -> Pieces:
        shown = Source()
        pieces = rest(shown, tools)
        texts = source.until(*markers, trim=True)
        while not shown.ended:
            try:
                text = next(texts)
            except StopIteration as stop:
                if stop.value is not None:
                    yield from source.skip_space()
                    texts = source.until(*markers, trim=True)
                    continue
                shown.ended = True
            else:
                if text is None:
                    yield None
                    continue
                shown.push(text)
            for piece in pieces:
                if piece is None:
                    break
                yield piece

    return parse


def reasoning_tokens(
    reader: Reader, tokenizer: Tokenizer, ids: Sequence[int], *, skip_special: bool = True
) -> int:
    """Count the ids of a complete answer that belong to reasoning.

    All ids between two markers count, also those of white space alone; those of the markers do
    not. That is vLLM's rule. `reader` must be unused; `skip_special` must be
    the setting with which its text is decoded. The count depends only on the ids, so any node gets
    the same number."""
    decoder = TextReader(tokenizer, skip_special)
    texts = [decoder.push(token_id) for token_id in ids]
    spans = reader.reasoning_in("".join(texts) + decoder.finish())
    count = place = 0
    for text in texts:
        # An id without text is special, or the start of a character that a later id completes.
        end = place + max(len(text), 1)
        count += any(begin < end and place < behind for begin, behind in spans)
        place += len(text)
    return count
