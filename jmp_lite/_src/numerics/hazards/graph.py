"""A value of a program: what made it, what reads it, and what is known of it.

This is the one data structure of `lint`. `opening` lists the values of a function, each
with its range, `scaling` notes what depends on gradients, and the rules read it.

Two operations are not primitives. `MOVE` relates a scanned array and its rows, or a
sharded array and its shards. `JOIN` has several possible values: a loop carry (its
first operand is the initial value) or the result of branches.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp_lite._src import dtypes
from jmp_lite._src.jaxprs import primitives
from jmp_lite._src.jaxprs.primitives import Fact

MOVE, JOIN = "move", "join"


class Range(NamedTuple):
    """Between which numbers those of a value are."""

    low: float
    high: float
    is_all: bool = True  # those of `where(mask, x, -1e9)` are not all known
    is_integral: bool = False
    is_position: bool = False  # from `arange` or `cumsum`
    is_constant: bool = True  # not computed by arithmetic

    @property
    def bound(self) -> float:
        return max(abs(self.low), abs(self.high))


class Scaling(NamedTuple):
    """How a value depends on gradients, and on the loss scales of a program."""

    # Of each loss scale; None if any fits, as of constants and inputs. That of a scale
    # itself is 1, of its inverse -1, of scaled gradients 1, of their squares 2.
    power: tuple[float, ...] | None = None
    is_known: bool = True  # not behind a kernel, nor in a sum of several powers
    is_zero: bool = False  # as gradients of what is not used, or not computed yet
    is_gradient: bool = False
    is_still_scaled: bool = False  # made of gradients that no scale divides yet
    decides: bool = False  # whether gradients are in it that no choice kept out
    is_choice: bool = False  # between what gradients made and what they did not
    is_kept: bool = False  # whether such a choice is in it
    is_update: bool = False  # whether it is made of updates of `scale_aware`
    fault: str = ""

    @property
    def is_scaled(self) -> bool:
        return any(self.power or ())


@dataclasses.dataclass(eq=False, repr=False)  # it would print the whole graph
class Value:
    """An input, a constant, or the result of an operation, and that operation."""

    dtype: Any  # None if it has none
    shape: tuple[int, ...]
    array: np.ndarray | None = None  # its numbers, if it is a constant
    name: str = ""  # of the primitive, or `MOVE`, or `JOIN`; "" for inputs, constants
    eqn: Any = None  # the equation of a result
    ins: list["Value"] = dataclasses.field(default_factory=list)
    mask: "Value | None" = None  # which of its cases it is, or which branch of a `cond`
    uses: list["Value"] = dataclasses.field(default_factory=list)  # once per operand
    path: str = ""  # of name scopes, with those of autocast
    line: str = ""  # `file:line` of the user's code
    times: int = 1  # it runs: the trips of the loops around it, 1 for a `while`
    is_backward: bool = False  # made by transposition
    is_differentiated: bool = False  # of a function that is, or its derivative
    is_result: bool = False  # of the function
    is_loss_scale: bool = False  # an input that a `DynamicLossScale` holds
    is_param: bool = False  # an input that a differentiated function reads
    range: Range | None = None
    scaling: Scaling = Scaling(is_zero=True)

    @property
    def is_half(self) -> bool:
        return dtypes.is_half(self.dtype)

    @property
    def is_float(self) -> bool:
        return self.dtype is not None and jnp.issubdtype(self.dtype, jnp.inexact)

    @property
    def is_input(self) -> bool:
        return not self.name and self.array is None

    @property
    def is_cast(self) -> bool:
        return self.name == primitives.CAST

    @property
    def is_cast_to_half(self) -> bool:
        return self.is_cast and self.is_half and not self.ins[0].is_half

    @property
    def is_carry(self) -> bool:
        return self.name == JOIN and self.eqn.primitive.name in primitives.LOOPS

    @property
    def number(self) -> float | None:
        """The constant that all of it is, None if it is none."""
        known = self.range
        if known is None or known.low != known.high:
            return None
        return known.low if known.is_all and known.is_constant else None

    @functools.cached_property
    def facts(self) -> int:
        return primitives.facts(self.name)

    @functools.cached_property
    def sources(self) -> Sequence["Value"]:
        """The operands whose numbers it holds: one of a move, several of a join.

        None of a loop carry, nor of a maximum: what that leaves out matters.
        """
        if self.name in (MOVE, JOIN):
            return () if self.is_carry else self.ins
        is_maximum = self.facts & Fact.CHOOSES and self.mask is None
        return () if is_maximum else primitives.held(self.name, self.ins, 0, 1)

    @property
    def held(self) -> Sequence["Value"]:
        """Those, if it is no choice by a mask or by the branch of a `cond`."""
        return () if self.mask else self.sources

    @property
    def cases(self) -> Sequence["Value"]:
        """Those, if it is a choice."""
        return self.sources if self.mask else ()

    @functools.cached_property
    def degrees(self) -> tuple[float, ...]:
        """The power of each operand in it, () if it is no product of powers."""
        return primitives.degrees(self.name, self.eqn.params) if self.eqn else ()

    @functools.cached_property
    def factors(self) -> list[tuple["Value", "Value", float]]:
        """Each operand that is multiplied, by which other one, to which power.

        Elementwise: a matrix product has none. A divisor is not multiplied.
        """
        if len(self.degrees) != 2 or self.facts & Fact.PRODUCT:
            return []
        (lhs, rhs), (of_lhs, of_rhs) = self.ins, self.degrees
        pairs = [(lhs, rhs, of_rhs, of_lhs), (rhs, lhs, of_lhs, of_rhs)]
        return [(x, by, degree) for x, by, degree, own in pairs if own > 0.0]

    @property
    def divisors(self) -> list["Value"]:
        pairs = zip(self.ins, self.degrees, strict=False)
        return [value for value, degree in pairs if degree < 0.0]


def origin(value: Value) -> Value:
    """Return the value before all moves."""
    while len(value.held) == 1:
        (value,) = value.held
    return value


def uncast(value: Value) -> Value:
    """Return the value before all moves and casts."""
    value = origin(value)
    while value.is_cast:
        value = origin(value.ins[0])
    return value


def behind(
    values: Iterable[Value], through: Callable[[Value], Iterable[Value]]
) -> Iterator[Value]:
    """Yield values, those that `through` leads to, and so on, each once."""
    waiting, seen = list(values), set()
    while waiting:
        value = waiting.pop()
        if value not in seen:
            seen.add(value)
            yield value
            waiting += through(value)


def ahead(value: Value, through: Callable[[Value, Value], bool]) -> Iterator[Value]:
    """Yield a value, and what stands for it.

    `through` says of a value and its operand whether the one stands for the other.
    """
    return behind([value], lambda x: [use for use in x.uses if through(use, x)])


def readers(
    value: Value, through: Callable[[Value, Value], bool]
) -> Iterator[tuple[Value, Value]]:
    """Yield what reads a value, or what stands for it, each with what it reads."""
    for x in ahead(value, through):
        yield from ((use, x) for use in x.uses if not through(use, x))


def moves(use: Value, value: Value) -> bool:
    """Return whether the one holds the numbers of the other."""
    return value in use.held


def casts(use: Value, value: Value) -> bool:
    """Return whether the one holds the numbers of the other, perhaps rounded."""
    return use.is_cast or value in use.held


def terms_of(value: Value, through_choices: bool = False) -> set[tuple[Value, bool]]:
    """Return what a value is a sum of, constants left out: `wd * p + u` is p and u.

    Each term comes with whether it is multiplied by a factor; `through_choices` makes
    both values of a choice terms.
    """
    waiting, seen, terms = [(value, False)], set(), set()
    while waiting:
        value, scaled = waiting.pop()
        if (value, scaled) in seen or value.number is not None:
            continue
        seen.add((value, scaled))
        inner = value.held if len(value.held) == 1 else ()
        if value.is_cast or value.name == JOIN or value.facts & Fact.LINEAR:
            # What a loop carries is what it began with, after some steps.
            inner = value.ins[:1] if value.is_carry else value.ins
        elif through_choices and value.cases:
            inner = value.cases
        elif found := [(x, by) for x, by, _ in value.factors if origin(by).shape == ()]:
            inner = [x for x, _ in found]
            # By its norm, a parameter is projected, which a skipped step repeats.
            scaled |= any(not by.scaling.is_gradient for _, by in found)
        if value.is_backward or not inner:
            terms.add((value, scaled))
        else:
            waiting += [(x, scaled) for x in inner]
    return terms
