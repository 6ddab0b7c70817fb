"""The alphabet of byte-level BPE, which spells every byte as one printable character.

Bytes that are printable in Latin-1 stand for themselves; the other 68 map to U+0100 and up.
"""

from __future__ import annotations


def _alphabet() -> tuple[str, ...]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(rest)) for byte in range(256))


BYTE_TO_CHAR = _alphabet()
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}
