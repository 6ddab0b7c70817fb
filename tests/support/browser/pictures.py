"""Writes the pictures of the live page in docs/pictures, with the digest of the page's files.

    make pictures        starts a pool of the demo model, chats with it, and kills a node

In: the page, and the demo model on this machine's CPUs. Out: PNG files of few colours, so that they
are small, and `page.sha256`, which tests/bones/test_pictures.py compares with the page.
"""

from __future__ import annotations

import re
import struct
import sys
import zlib

import numpy as np
from playwright.sync_api import Browser, Page, expect

from baton_cli.models.demo_model import fetch_demo
from tests.support.browser.load import Load
from tests.support.browser.visits import WIDE, Scheme, browser_running, visiting
from tests.support.pools.processes import Cluster
from tests.support.project.page_digest import DIGEST, PICTURES, page_digest

QUESTION = "Tell me about the history of relay races and of the baton that runners hand over."
WATCH_MS = 45_000  # what the charts show
PATIENCE_MS = 240_000.0
LEVELS = 32  # shades per colour: no difference for the eye, and half the size


def write_picture(page: Page, name: str) -> None:
    (PICTURES / name).write_bytes(small_png(page.screenshot()))


def small_png(picture: bytes) -> bytes:
    """The picture with fewer shades and strong compression; 8 bits, RGB or RGBA in, RGB out."""
    width, height = struct.unpack(">II", picture[16:24])
    channels = {2: 3, 6: 4}[picture[25]]
    data, place = b"", 8
    while place < len(picture):
        (length,) = struct.unpack(">I", picture[place : place + 4])
        if picture[place + 4 : place + 8] == b"IDAT":
            data += picture[place + 8 : place + 8 + length]
        place += length + 12
    pixels = _pixels(zlib.decompress(data), width, height, channels)[:, :, :3]
    step = 256 // LEVELS
    shades = np.minimum((pixels.astype(np.uint16) + step // 2) // step * step, 255)
    return _encode(shades.astype(np.uint8))


def _pixels(rows: bytes, width: int, height: int, channels: int) -> np.ndarray:
    """Undo the filters of a PNG's rows."""
    table = np.frombuffer(rows, np.uint8).reshape(height, width * channels + 1)
    before = np.zeros((width, channels), np.int16)
    out = np.empty((height, width, channels), np.uint8)
    for y, row in enumerate(table):
        kind, line = row[0], row[1:].reshape(width, channels).astype(np.int16)
        if kind == 1:
            line = np.cumsum(line, axis=0)
        elif kind == 2:
            line = line + before
        elif kind in (3, 4):
            line = _by_neighbours(kind, line, before)
        before = line % 256
        out[y] = before
    return out


def _by_neighbours(kind: int, line: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Undo the filters "average" (3) and "Paeth" (4), which need the pixel before."""
    left, corner = [0] * line.shape[1], [0] * line.shape[1]
    result = []
    for values, above in zip(line.tolist(), before.tolist(), strict=True):
        if kind == 3:
            pixel = [(v + (a + b) // 2) % 256 for v, a, b in zip(values, left, above, strict=True)]
        else:
            pixel = [
                (v + _paeth(a, b, c)) % 256
                for v, a, b, c in zip(values, left, above, corner, strict=True)
            ]
        left, corner = pixel, above
        result.append(pixel)
    return np.array(result, np.int16)


def _paeth(left: int, above: int, corner: int) -> int:
    guess = left + above - corner
    return min((left, above, corner), key=lambda value: abs(guess - value))


def _encode(pixels: np.ndarray) -> bytes:
    """A PNG: with a palette if 256 colours suffice, otherwise RGB with the filter "up"."""
    height, width, _ = pixels.shape
    colours, indices = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True)
    if len(colours) <= 256:
        kind, palette = 3, _chunk(b"PLTE", colours.tobytes())
        rows = np.pad(indices.reshape(height, width).astype(np.uint8), ((0, 0), (1, 0)))
    else:
        kind, palette = 2, b""
        flat = pixels.reshape(height, -1)
        rows = np.pad(np.diff(flat, axis=0, prepend=np.zeros_like(flat[:1])), ((0, 0), (1, 0)))
        rows[:, 0] = 2
    head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    data = zlib.compress(rows.tobytes(), 9)
    body = _chunk(b"IHDR", head) + palette + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _page_pictures(browser: Browser, pool: Cluster) -> None:
    """The page of a busy pool, light and dark."""
    schemes: tuple[Scheme, Scheme] = ("light", "dark")
    with (
        Load(pool.url, 3, tokens=40),
        visiting(browser, pool.url, WIDE, schemes[0]) as light,
        visiting(browser, pool.url, WIDE, schemes[1]) as dark,
    ):
        light.page.wait_for_timeout(WATCH_MS)
        for scheme, visit in zip(schemes, (light, dark), strict=True):
            expect(visit.page.locator(".edge[data-lit=yes]").first).to_be_attached()
            write_picture(visit.page, f"page-{scheme}.png")


def _failover_picture(browser: Browser, pool: Cluster) -> None:
    """A chat whose decode node is killed in the middle of the answer."""
    with visiting(browser, pool.url, (1280, 760)) as visit:
        page = visit.page
        page.locator("#question").fill(QUESTION)
        page.keyboard.press("Enter")
        meta = page.locator(".answer .meta")
        expect(meta).to_contain_text("longest pause", timeout=PATIENCE_MS)
        found = re.search(r"decode-\d", meta.inner_text())
        assert found is not None, meta.inner_text()
        page.wait_for_timeout(3000)
        pool.nodes[found[0]].kill()
        expect(page.locator(".takeover")).to_be_visible(timeout=PATIENCE_MS)
        page.locator("#messages").evaluate("list => { list.scrollTop = list.scrollHeight; }")
        write_picture(page, "failover.png")


def main() -> None:
    model = fetch_demo(None, lambda line: print(line, file=sys.stderr))
    PICTURES.mkdir(exist_ok=True)
    flags = ["--model", str(model), "--dtype=float32", "--threads=1", "--kv-blocks=400"]
    with (
        Cluster(1, 2, flags=flags, router_flags=["--handoff=always"]) as pool,
        browser_running() as browser,
    ):
        _page_pictures(browser, pool)
        _failover_picture(browser, pool)
    DIGEST.write_text(page_digest() + "\n")


if __name__ == "__main__":
    main()
