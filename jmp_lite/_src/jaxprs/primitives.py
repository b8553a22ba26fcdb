"""Facts of primitives, which the table of autocast and the rules of `lint` share.

A fact is a property of the primitive itself, whatever is done with it.
`tests/jaxprs/test_primitives.py` checks each of them on an example.
"""

import enum
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Fact(enum.Flag):
    """What is known of a primitive."""

    MOVES = enum.auto()
    """Every number of a result is one of the first operand, or of the operand with the
    result's index if there are as many operands as results."""

    JOINS = enum.auto()
    """Every number of the result is one of several operands."""

    CHOOSES = enum.auto()
    """Which of the numbers is in the result depends on numbers or on a mask."""

    IN_ORDER = enum.auto()
    """A result of the operand's size has its numbers in the same order."""

    SUMS = enum.auto()
    """Every number of the result is a sum over many numbers, or made of one."""


_TABLE: tuple[tuple[Fact, str], ...] = (
    (Fact.MOVES | Fact.IN_ORDER, "broadcast_in_dim reshape squeeze expand_dims copy"),
    (Fact.MOVES, "transpose rev slice dynamic_slice gather split unstack tile"),
    (Fact.JOINS, "concatenate stack pad dynamic_update_slice scatter"),
    (Fact.JOINS | Fact.CHOOSES, "select_n"),
    (Fact.MOVES | Fact.CHOOSES, "reduce_max reduce_min cummax cummin"),
    (Fact.MOVES | Fact.CHOOSES, "reduce_window_max reduce_window_min pmax pmin"),
    (Fact.MOVES | Fact.IN_ORDER, "stop_gradient name optimization_barrier"),
    (Fact.MOVES | Fact.IN_ORDER, "pvary pbroadcast device_put sharding_constraint"),
    (Fact.MOVES, "all_gather all_gather_invariant all_to_all ppermute"),
    (Fact.SUMS, "reduce_sum cumsum cumlogsumexp reduce_window_sum"),
    (Fact.SUMS, "scatter-add scatter_add psum psum2 psum_invariant"),
    (Fact.SUMS, "reduce_scatter unreduced_psum"),
)

FACTS: dict[str, Fact] = {
    name: fact for fact, names in _TABLE for name in names.split()
}

# The operands that a JOINS holds numbers of, where it has others.
_JOINED = {
    "select_n": slice(1, None),
    "dynamic_update_slice": slice(2),
    "scatter": slice(0, None, 2),
}


def named(fact: Fact) -> tuple[str, ...]:
    """Return the primitives with any of some facts, in the order of the table.

    Examples:
      >>> named(Fact.JOINS)[:3]
      ('concatenate', 'stack', 'pad')
    """
    return tuple(name for name, facts in FACTS.items() if facts & fact)


def held(name: str, operands: Sequence[T], result: int, results: int) -> Sequence[T]:
    """Return the operands whose numbers a result holds; none if it computes its own.

    Args:
      name: the primitive.
      operands: its operands.
      result: the index of the result.
      results: how many it has.

    Examples:
      >>> held("select_n", ["mask", "x", "y"], 0, 1)
      ['x', 'y']
      >>> held("gather", ["x", "index"], 0, 1), held("add", ["x", "y"], 0, 1)
      (['x'], [])
    """
    fact = FACTS.get(name, Fact(0))
    if fact & Fact.JOINS:
        return operands[_JOINED.get(name, slice(None))]
    if not fact & Fact.MOVES:
        return operands[:0]
    index = result if len(operands) == results else 0
    return operands[index : index + 1]
