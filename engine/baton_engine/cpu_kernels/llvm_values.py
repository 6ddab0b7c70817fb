"""LLVM's types of numbers and vectors, and the few instructions that all emitted code needs.

In and out: values of an llvmlite builder. An address is an int64.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

LANES = 16
NUMBER = ir.FloatType()
WORD = ir.IntType(32)
ADDRESS = ir.IntType(64)
NUMBERS = ir.VectorType(NUMBER, LANES)
WORDS = ir.VectorType(WORD, LANES)
VECTOR_BYTES = 4 * LANES  # of both


def each_word(value: int) -> Any:
    """A constant vector of equal words."""
    return ir.Constant(WORDS, [value] * LANES)


def in_each_lane(builder: Any, value: Any, kind: Any) -> Any:
    """A vector of type `kind` with the value in each lane."""
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(WORD, 0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), each_word(0))


def after(builder: Any, place: Any, offset: int) -> Any:
    """The address `offset` bytes after another."""
    return builder.add(place, ir.Constant(ADDRESS, offset))


def load_at(builder: Any, place: Any, kind: Any) -> Any:
    """Load a value of type `kind` from an address that 4 divides."""
    value = builder.load(builder.inttoptr(place, kind.as_pointer()), typ=kind)
    value.align = 4
    return value


def store_at(builder: Any, place: Any, value: Any) -> None:
    """Store a value at an address that 4 divides."""
    builder.store(value, builder.inttoptr(place, value.type.as_pointer())).align = 4
