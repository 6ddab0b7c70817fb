"""The rule that decides between fetching and computing: case by case, and for random figures."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_decode_node.fetch_decision import FetchCosts, FetchDecision, decide, usable
from baton_node.engine.chunk_sets import chunks_of, first_chunks
from baton_protocol.layout import KVGroup, KVLayout
from baton_protocol.store import DataInstance

# 4 blocks of 16 tokens and 64 KiB: a chunk is 64 tokens and 256 KiB.
LAYOUT = KVLayout(
    num_layers=4, num_kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16", chunk_blocks=4
)
MIB = float(1 << 20)
FAST = DataInstance(get_bytes_per_s=1024 * MIB, get_latency_ms=1.0)  # a chunk in 1.24 ms
SLOW = DataInstance(get_bytes_per_s=MIB, get_latency_ms=1.0)  # a chunk in 251 ms
UNKNOWN = DataInstance()
BROKEN = msgspec.structs.replace(FAST, trouble="timed out")


def costs(*instances: DataInstance, speed: float = 6400.0) -> FetchCosts:
    """Return the costs. At 6,400 tokens/s a chunk is computed in 10 ms."""
    return FetchCosts(LAYOUT, speed, instances)


def on(instance: int, *chunks: int) -> dict[int, int]:
    return dict.fromkeys(chunks, instance)


def test_a_chunk_is_256_kib() -> None:
    assert LAYOUT.chunk_bytes == MIB / 4


def test_a_run_that_is_fetched_faster_is_fetched_with_both_predictions() -> None:
    decision = decide(on(0, 0, 1), 0, costs(FAST))
    assert (decision.fetch, decision.declined) == (0b11, 0)
    assert decision.fetch_ms == pytest.approx(1.0 + 0.5 / 1024 * 1000)
    assert decision.compute_ms == pytest.approx(20.0)


def test_a_run_that_is_computed_faster_is_declined_with_both_predictions() -> None:
    decision = decide(on(0, 0, 1), 0, costs(SLOW))
    assert (decision.fetch, decision.declined) == (0, 0b11)
    assert decision.fetch_ms == pytest.approx(501.0)
    assert decision.compute_ms == pytest.approx(20.0)


def test_a_run_with_equal_times_is_computed() -> None:
    even = DataInstance(get_bytes_per_s=25 * MIB)
    assert decide(on(0, 0), 0, costs(even)).declined == 0b1


@pytest.mark.parametrize(
    "figures", [costs(UNKNOWN), costs(), costs(SLOW, speed=0.0), costs(FAST, UNKNOWN)]
)
def test_a_run_with_an_unmeasured_speed_is_fetched(figures: FetchCosts) -> None:
    assert decide({0: 0, 1: 1}, 0, figures).fetch == 0b11


def test_data_servers_work_in_parallel_and_the_slowest_counts() -> None:
    half = DataInstance(get_bytes_per_s=50 * MIB, get_latency_ms=2.0)
    striped = {chunk: chunk % 2 for chunk in range(4)}
    one = decide(on(0, *range(4)), 0, costs(half, half))
    two = decide(striped, 0, costs(half, half))
    assert one.fetch_ms == pytest.approx(2 + 20)
    assert two.fetch_ms == pytest.approx(2 + 10)
    assert decide(striped, 0, costs(half, SLOW)).declined == 0b1111


def test_each_run_of_neighbouring_chunks_is_decided_separately() -> None:
    # A long run is worth the latency, a single chunk is not.
    far = DataInstance(get_bytes_per_s=1024 * MIB, get_latency_ms=15.0)
    decision = decide(on(0, 0, 1, 2, 5), 0, costs(far))
    assert (decision.fetch, decision.declined) == (0b111, 0b100000)


def test_cached_chunks_are_neither_fetched_nor_counted() -> None:
    decision = decide(on(0, 0, 1, 2), 8, costs(FAST))
    assert decision.fetch == 0b100
    assert decision.compute_ms == pytest.approx(10.0)


def test_a_partly_cached_chunk_is_fetched_whole_or_its_rest_is_computed() -> None:
    near = DataInstance(get_bytes_per_s=50 * MIB)  # 5 ms
    assert decide(on(0, 0), 1, costs(near)).fetch == 0b1  # against 7.5 ms
    assert decide(on(0, 0), 3, costs(near)).declined == 0b1  # against 2.5 ms


@pytest.mark.parametrize("policy", ["auto", "always", "never"])
def test_chunks_on_a_server_in_trouble_count_as_absent(policy: str) -> None:
    decision = decide({0: 0, 1: 1, 2: 0}, 0, costs(FAST, BROKEN), policy)  # type: ignore[arg-type]
    assert (decision.fetch | decision.declined) == 0b101


def test_chunks_on_a_full_server_are_fetched() -> None:
    full = msgspec.structs.replace(FAST, put_trouble="full")
    assert decide(on(0, 0), 0, costs(full)).fetch == 0b1


def test_without_chunks_the_decision_is_empty() -> None:
    assert decide({}, 0, costs(FAST)) == FetchDecision()


def test_the_policies_always_and_never_ignore_the_predictions_but_report_them() -> None:
    slow, fast = costs(SLOW), costs(FAST)
    assert decide(on(0, 0), 0, slow, "always").fetch == 0b1
    assert decide(on(0, 0), 0, fast, "never").declined == 0b1
    assert decide(on(0, 0), 0, fast, "never").fetch_ms > 0


# --- layers with a window -------------------------------------------------------------------------


def windowed(window: int, *, full: bool) -> KVLayout:
    """LAYOUT with a group that has a window, and with `full` one that has none."""
    groups = (KVGroup((2, 3), window),)
    return msgspec.structs.replace(LAYOUT, groups=(KVGroup((0, 1)), *groups) if full else groups)


@pytest.mark.parametrize(
    ("exists", "complete", "full", "useful", "unneeded"),
    [
        # 6 chunks of 64 tokens. A window of 100 tokens reaches into the last two.
        (0b111111, 0b110000, True, 0b111111, 0),
        (0b111111, 0b110000, False, 0b110000, 0b001111),
        (0b111111, 0b111111, False, 0b110000, 0b001111),
        # Without the windows of a chunk at the end it is computed, and so are the chunks that its
        # own tokens see, up to two that are complete.
        (0b111111, 0b100000, True, 0b100000, 0),
        (0b111111, 0b100110, True, 0b100111, 0),
        (0b111111, 0b100110, False, 0b100110, 0b000001),
        (0b111111, 0b000000, True, 0, 0),
        # A shorter prompt was stored: its last windows continue it.
        (0b001111, 0b001100, True, 0b001111, 0),
        (0b001111, 0b001111, False, 0b001100, 0b000011),
        (0b001111, 0b001000, True, 0b001000, 0),
    ],
)
def test_stored_chunks_are_usable_up_to_a_window_that_is_stored(
    exists: int, complete: int, full: bool, useful: int, unneeded: int
) -> None:
    layout = windowed(100, full=full)
    assert usable(layout, 6, exists, complete, 0) == (useful, unneeded)


def test_without_windows_each_stored_chunk_is_usable() -> None:
    assert usable(LAYOUT, 6, 0b101001, 0, 0) == (0b101001, 0)


@given(
    chunks=st.integers(1, 6),
    exists=st.integers(0, 63),
    complete=st.integers(0, 63),
    cached=st.integers(0, 24),
    window=st.integers(2, 300),
    full=st.booleans(),
)
def test_no_smaller_set_of_chunks_could_be_computed(
    chunks: int, exists: int, complete: int, cached: int, window: int, full: bool
) -> None:
    """The chunks that are neither cached, useful nor unneeded are computed. The oracle tries all
    sets of chunks to compute."""
    layout, cached = windowed(window, full=full), min(cached, chunks * 4)
    exists &= first_chunks(chunks)
    complete &= exists
    useful, unneeded = usable(layout, chunks, exists, complete, cached)
    mine = range(cached // 4, chunks)
    expected = set(mine)
    for choice in range(1 << len(mine)):
        computed = {chunk for i, chunk in enumerate(mine) if choice >> i & 1}
        starts = [max(chunk * 64, cached * 16) for chunk in computed] + [chunks * 64 - 1]
        if all(
            (exists >> chunk & 1 or not full)
            and (
                complete >> chunk & 1
                or all(
                    start - window + 1 >= (chunk + 1) * 64
                    for start in starts
                    if start >= (chunk + 1) * 64 or start == chunks * 64 - 1
                )
            )
            for chunk in set(mine) - computed
        ):
            expected &= computed
    assert set(mine) - set(chunks_of(useful | unneeded)) == expected
    assert useful & ~exists == 0
    assert useful & unneeded == 0


def test_chunks_without_windows_are_fetched_in_less_time() -> None:
    half = DataInstance(get_bytes_per_s=50 * MIB)  # a complete chunk in 5 ms
    figures = FetchCosts(windowed(100, full=True), 6400.0, (half,))
    assert figures.layout.chunk_bytes == MIB / 4
    decision = decide(on(0, 0, 1, 2, 3), 0, figures, partial=0b0011)
    assert decision.fetch_ms == pytest.approx(2 * 2.5 + 2 * 5)


def test_needless_chunks_count_for_the_tokens_that_need_not_be_computed() -> None:
    slow = DataInstance(get_bytes_per_s=MIB / 4 / 0.03)  # a chunk in 30 ms
    figures = FetchCosts(windowed(100, full=False), 6400.0, (slow,))
    layout_ms = 30 * figures.layout.chunk_bytes / (MIB / 4)
    decision = decide(on(0, 8), 0, figures, unneeded=0b011111111)
    assert (decision.fetch, decision.declined, decision.unneeded) == (1 << 8, 0, 0b011111111)
    assert decision.fetch_ms == pytest.approx(layout_ms)
    assert decision.compute_ms == pytest.approx(90.0)
    declined = decide(on(0, 8), 0, figures, "never", unneeded=0b011111111)
    assert (declined.fetch, declined.declined, declined.unneeded) == (0, 1 << 8, 0)


# --- random figures -------------------------------------------------------------------------------

rates = st.just(0.0) | st.floats(1e3, 1e12)
instances = st.builds(
    DataInstance,
    get_bytes_per_s=rates,
    get_latency_ms=st.floats(0, 1e3),
    trouble=st.sampled_from(["", "", "timed out"]),
)
placed = st.dictionaries(st.integers(0, 30), st.integers(0, 3), max_size=31)


@given(
    chunks=placed,
    cached=st.integers(0, 124),
    speed=rates,
    servers=st.lists(instances, min_size=4, max_size=4),
)
def test_each_run_is_fetched_exactly_if_that_is_faster(
    chunks: dict[int, int], cached: int, speed: float, servers: list[DataInstance]
) -> None:
    decision = decide(chunks, cached, costs(*servers, speed=speed))
    assert decision.fetch & decision.declined == 0
    considered = {
        chunk
        for chunk, server in chunks.items()
        if not servers[server].trouble and (chunk + 1) * 4 > cached
    }
    assert decision.fetch | decision.declined == sum(1 << chunk for chunk in considered)
    for run in runs_of(considered):
        fetched = [decision.fetch >> chunk & 1 for chunk in run]
        assert len(set(fetched)) == 1, "a run is one decision"
        fetch_s = fetch_seconds(run, chunks, servers)
        blocks = set(range(run[0] * 4, run[-1] * 4 + 4)) - set(range(cached))
        compute_s = len(blocks) * 16 / speed if speed else math.inf
        if not math.isclose(fetch_s, compute_s, rel_tol=1e-9):
            assert fetched[0] == (fetch_s < compute_s)


def runs_of(chunks: set[int]) -> list[list[int]]:
    """Group neighbouring chunks, from the first to the last chunk of each run."""
    starts = [chunk for chunk in sorted(chunks) if chunk - 1 not in chunks]
    ends = [chunk for chunk in sorted(chunks) if chunk + 1 not in chunks]
    return [list(range(start, end + 1)) for start, end in zip(starts, ends, strict=True)]


def fetch_seconds(run: list[int], chunks: dict[int, int], servers: list[DataInstance]) -> float:
    """Return the seconds to fetch a run; 0 if the speed of one of its servers is not measured."""
    chunks_on = Counter(chunks[chunk] for chunk in run)
    if any(servers[server].get_bytes_per_s == 0 for server in chunks_on):
        return 0.0
    return max(
        servers[server].get_latency_ms / 1e3
        + count * LAYOUT.chunk_bytes / servers[server].get_bytes_per_s
        for server, count in chunks_on.items()
    )


@given(chunks=placed, server=st.integers(0, 3), rate=st.floats(1e3, 1e12), factor=st.floats(1, 1e6))
def test_more_bandwidth_never_fetches_less(
    chunks: dict[int, int], server: int, rate: float, factor: float
) -> None:
    def fetched(rate: float) -> int:
        servers = [FAST, SLOW, FAST, SLOW]
        servers[server] = DataInstance(get_bytes_per_s=rate, get_latency_ms=1.0)
        return decide(chunks, 0, costs(*servers)).fetch

    assert fetched(rate) & ~fetched(rate * factor) == 0
