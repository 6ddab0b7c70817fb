"""Block hashes: every process computes the same ones, and different content never shares one."""

import hashlib
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.hashing import block_hasher, chunk_hashes, extend_hashes, root_hash, tenant_salt
from baton_protocol.ids import Fingerprint

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=60)
ROOT = root_hash(Fingerprint("f" * 32))


def test_the_formula_is_sha256_over_length_framed_little_endian_parts() -> None:
    def frame(*parts: bytes) -> bytes:
        return b"".join(struct.pack("<I", len(p)) + p for p in parts)

    root = hashlib.sha256(frame(b"fp", b"lora", b"salt")).digest()[:16]
    assert root_hash(Fingerprint("fp"), "lora", "salt") == root
    block = hashlib.sha256(frame(root, struct.pack("<2I", 7, 2**31), b"")).digest()[:16]
    assert extend_hashes(root_hash(Fingerprint("fp"), "lora", "salt"), [7, 2**31, 9], 2) == [block]


@pytest.mark.integration
def test_another_process_computes_the_same_hashes() -> None:
    code = (
        "from baton_protocol.hashing import *; "
        "print(extend_hashes(root_hash('f' * 32), range(8), 4)[-1].hex())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == extend_hashes(ROOT, range(8), 4)[-1].hex()


@given(TOKENS, st.integers(1, 8))
def test_only_full_blocks_have_a_hash(tokens: list[int], block: int) -> None:
    assert len(extend_hashes(ROOT, tokens, block)) == len(tokens) // block


@given(TOKENS, st.integers(1, 8), st.integers(0, 7))
def test_a_chain_continues_from_any_of_its_blocks(tokens: list[int], block: int, cut: int) -> None:
    whole = extend_hashes(ROOT, tokens, block)
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else ROOT
    assert whole[:cut] + extend_hashes(parent, tokens[cut * block :], block) == whole


@given(st.lists(st.integers(0, 99), min_size=8, max_size=40), st.integers(0, 39))
def test_a_changed_token_changes_the_hashes_of_its_block_and_all_later_blocks(
    tokens: list[int], at: int
) -> None:
    at %= len(tokens)
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    for index, (a, b) in enumerate(
        zip(extend_hashes(ROOT, tokens, 4), extend_hashes(ROOT, changed, 4), strict=True)
    ):
        assert (a == b) == (index < at // 4)


def test_the_adapter_the_salt_and_the_extra_bytes_change_the_hash() -> None:
    fp = Fingerprint("f" * 32)
    roots = {
        root_hash(fp),
        root_hash(fp, adapter="x"),
        root_hash(fp, salt="x"),
        root_hash(Fingerprint("g" * 32)),
    }
    assert len(roots) == 4
    plain = extend_hashes(ROOT, [1, 2], 1)
    assert extend_hashes(ROOT, [1, 2], 1, [b"", b""]) == plain
    assert extend_hashes(ROOT, [1, 2], 1, [b"", b"image"])[0] == plain[0]
    assert extend_hashes(ROOT, [1, 2], 1, [b"", b"image"])[1] != plain[1]


def test_a_chunk_has_the_hash_of_its_last_block() -> None:
    blocks = extend_hashes(ROOT, range(14), 2)
    assert chunk_hashes(blocks, 3) == [blocks[2], blocks[5]]


def test_block_hasher_gives_the_hashes_of_the_whole_chain() -> None:
    first, second = extend_hashes(ROOT, range(8), 4, [b"image", b""])
    hash_block = block_hasher(4)
    assert hash_block(ROOT, range(4), b"image") == first
    assert hash_block(first, range(4, 8)) == second


def test_a_negative_token_id_is_refused() -> None:
    with pytest.raises(OverflowError):
        extend_hashes(ROOT, [-1], 1)


def test_bytes_hash_like_the_same_token_ids_in_a_list() -> None:
    assert extend_hashes(ROOT, b"abcdefgh", 4) == extend_hashes(ROOT, list(b"abcdefgh"), 4)


def test_the_salt_depends_on_secret_and_tenant() -> None:
    salts = {tenant_salt(b"a", "t"), tenant_salt(b"b", "t"), tenant_salt(b"a", "u")}
    assert len(salts) == 3
