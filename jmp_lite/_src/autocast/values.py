"""The values of variables while a plan runs, and how equations read them in half.

A variable has at most two values, the one that its equation returned and the cast of
it; each is computed once. Every read in half precision is differentiated as a cast of
its own, so that the gradients of what is read many times, or broadcast, are summed in
float32: see `sums`.
"""

import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from jmp_lite._src import compat
from jmp_lite._src.autocast import sums
from jmp_lite._src.autocast.precision import F32, is_f32, is_float
from jmp_lite._src.jaxprs import binding
from jmp_lite._src.jaxprs.primitives import Fact, facts

# A sum of two half gradients is rounded once, as is a float32 sum that is then cast:
# from three terms on, it is computed in float32.
_MANY_READS = 3


@dataclasses.dataclass(frozen=True)
class EqnReads:
    """How one equation reads its half operands.

    Attributes:
      half: per operand, whether it is half, or read in half.
      like: per operand, the variables that it is combined with elementwise and that
        depend on inputs of the jaxpr on which it does not depend itself.
      smaller: the half operands that are broadcast to the shape of the result.
      sums_backward: whether the transpose of the equation sums in half.
    """

    half: Sequence[bool]
    like: Mapping[int, Sequence[Any]] = dataclasses.field(default_factory=dict)
    smaller: Sequence[int] = ()
    sums_backward: bool = False


@dataclasses.dataclass(frozen=True)
class Reads:
    """How a jaxpr reads its half values.

    Attributes:
      of: how an equation does, by its `id`, for those that have half operands.
      many: the variables that are read so often that their gradients are to be summed
        in float32.
      differentiated: the variables through which a gradient may pass.
      is_derivative_rule: whether the jaxpr is a rule for derivatives. JAX transposes it
        as it is, so an operation on a tangent must be linear in it.
    """

    of: Mapping[int, EqnReads]
    many: frozenset[Any]
    differentiated: frozenset[Any]
    is_derivative_rule: bool = False


def find_reads(
    jaxpr: Any, half_in: Sequence[Sequence[bool]], is_derivative_rule: bool = False
) -> Reads:
    """Return how a jaxpr reads its half values.

    Args:
      jaxpr: the jaxpr, open.
      half_in: per equation and operand, whether a float32 operand is read in half.
      is_derivative_rule: whether the jaxpr is a rule for derivatives.
    """
    differentiated = _differentiated(jaxpr)
    of, reads, reads_in_f32 = {}, collections.Counter(), set()
    inputs = {v: 1 << i for i, v in enumerate(jaxpr.invars)}
    for eqn, cast_in in zip(jaxpr.eqns, half_in, strict=True):
        half = [
            is_cast or sums.is_half(v)
            for v, is_cast in zip(eqn.invars, cast_in, strict=True)
        ]
        variables = list(_variables(eqn.invars))
        inputs.update(
            dict.fromkeys(eqn.outvars, _union(inputs.get(v, 0) for v in variables))
        )
        is_differentiated = not differentiated.isdisjoint(eqn.outvars)
        if any(half) and is_differentiated:
            of[id(eqn)] = _eqn_reads(eqn, half, differentiated, inputs)
            reads.update(_variables(itertools.compress(eqn.invars, half)))
        if not all(half) and is_differentiated:
            reads_in_f32.update(v for v in variables if is_f32(v))
    reads.update(_variables(jaxpr.outvars))
    reads.update(reads_in_f32)
    many = frozenset(v for v, count in reads.items() if count >= _MANY_READS)
    return Reads(of, many, differentiated, is_derivative_rule)


def _variables(operands: Iterable[Any]) -> Iterator[Any]:
    return (v for v in operands if not compat.is_literal(v))


def _floats(operands: Iterable[Any]) -> Iterable[Any]:
    return filter(is_float, _variables(operands))


def _differentiated(jaxpr: Any) -> frozenset[Any]:
    """Return the variables between float inputs and float outputs."""
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name != "stop_gradient"]
    of_inputs = set(_floats([*jaxpr.constvars, *jaxpr.invars]))
    for eqn in eqns:
        if not of_inputs.isdisjoint(_variables(eqn.invars)):
            of_inputs.update(_floats(eqn.outvars))
    of_outputs = set(_floats(jaxpr.outvars))
    for eqn in reversed(eqns):
        if not of_outputs.isdisjoint(eqn.outvars):
            of_outputs.update(_floats(eqn.invars))
    return frozenset(of_inputs & of_outputs)


def _eqn_reads(
    eqn: Any, half: Any, differentiated: Any, inputs: Mapping[Any, int]
) -> EqnReads:
    name, like, smaller = eqn.primitive.name, {}, []
    known = facts(name)
    if known & (Fact.BROADCASTS | Fact.JOINS):
        shape = eqn.outvars[0].aval.shape
        for i, var in enumerate(eqn.invars):
            if not half[i] or compat.is_literal(var) or var not in differentiated:
                continue
            others = _covering(eqn.invars, inputs, var)
            if others:
                like[i] = others
            if known & Fact.BROADCASTS and var.aval.shape != shape:
                smaller.append(i)
    may_sum = not differentiated.isdisjoint(
        _variables(itertools.compress(eqn.invars, half))
    )
    return EqnReads(half, like, smaller, may_sum and sums.sums_backward(eqn))


def _covering(operands: Any, inputs: Mapping[Any, int], var: Any) -> Sequence[Any]:
    """Return operands that depend on all inputs that one operand does not depend on."""
    others = list(_variables(operands))
    missing = _union(inputs.get(v, 0) for v in others) & ~inputs.get(var, 0)
    found = []
    for other in others:
        if missing & inputs.get(other, 0):
            found.append(other)
            missing &= ~inputs.get(other, 0)
    return found


def _union(bits: Iterable[int]) -> int:
    return functools.reduce(operator.or_, bits, 0)


_NO_READS = Reads({}, frozenset(), frozenset())


class Values:
    """The values of the variables of one jaxpr, in half and in float32.

    Args:
      half_dtype: the compute dtype.
      reads: how the jaxpr reads them; by default, no derivative is taken.
      numbers: the variables that are numbers which the compute dtype represents.
    """

    def __init__(
        self,
        half_dtype: Any,
        reads: Reads = _NO_READS,
        numbers: frozenset[Any] = frozenset(),
    ):
        self.half_dtype = half_dtype
        self.reads, self.numbers = reads, numbers
        self._made: dict[Any, Any] = {}
        # The cast of a float32 value to half, or the float32 value of a half one.
        self._cast: dict[Any, Any] = {}
        self._saturated: dict[Any, Any] = {}
        # Of these, the cast has not been read.
        self._unread: set[Any] = set()
        # The moves that made half values whose float32 original is known.
        self._moved_by: dict[Any, Any] = {}

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Set the values of variables, in the dtypes in which they were computed."""
        self._made.update(zip(variables, values, strict=True))

    def read_as_made(self, var: Any) -> Any:
        """Return a value in the dtype in which it was computed."""
        return self._made[var]

    def read(self, variables: Sequence[Any], half: Sequence[bool]) -> list[Any]:
        """Return values, in half where `half` says so, else in the program's dtype."""
        return [
            self._in_half(v) if is_half or sums.is_half(v) else self._as_written(v)
            for v, is_half in zip(variables, half, strict=True)
        ]

    def in_f32(self, var: Any) -> Any:
        """Return a float value in float32: the one that was cast to half, if it was."""
        value = self._made[var]
        if value.dtype == F32:
            return value
        if var not in self._cast:
            move = self._moved_by.get(var)
            self._cast[var] = (
                binding.bind(move, [self.in_f32(move.invars[0])])[0]
                if move
                else lax.convert_element_type(value, F32)
            )
        return self._cast[var]

    def before_cast(self, var: Any, value: Any) -> Any:
        """Return the float32 value that a half one was cast from.

        Args:
          var: the variable.
          value: the half value, which is returned if that is not known.
        """
        is_known = not compat.is_literal(var) and (
            var in self._cast or var in self._moved_by
        )
        return self.in_f32(var) if is_known else value

    def note_casts(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Cast values here, and not where something reads them in half."""
        casts = self.cast_to_half(values, (True,) * len(values))
        self._cast.update(zip(variables, casts, strict=True))
        self._unread.update(variables)

    def cast_to_half(self, values: Sequence[Any], half: Sequence[bool]) -> list[Any]:
        """Return new values, cast where `half` says so."""
        return [
            lax.convert_element_type(x, self.half_dtype) if is_half else x
            for x, is_half in zip(values, half, strict=True)
        ]

    def apply_in_f32(self, eqn: Any, is_half: Sequence[bool]) -> list[Any]:
        """Return the results of arithmetic in float32, from half values or others.

        Of what is multiplied, the backward pass keeps the half values.

        Args:
          eqn: the equation.
          is_half: per operand, whether the result is half, and the operand is read in
            half by others.
        """
        if not any(is_half) and not self._multiplies(eqn):
            return self.apply(eqn, is_half)
        size = eqn.outvars[0].aval.size
        operands = [*map(self._as_written, eqn.invars)]
        if self._multiplies(eqn):
            kept = [
                self._value_in_half(v, False)[0]
                if is_half_value and v.aval.size == size
                else self._made[v]
                for v, is_half_value in zip(eqn.invars, is_half, strict=True)
            ]
            return [sums.multiply(eqn, operands, kept)]
        if eqn.primitive.name not in ("mul", "div"):
            operands = [
                sums.bound(x, self.half_dtype)
                if not compat.is_literal(v) and is_f32(v) and v.aval.size < size
                else x
                for v, x in zip(eqn.invars, operands, strict=True)
            ]
        return binding.bind_here(eqn, operands)

    def apply(self, eqn: Any, half: Sequence[bool]) -> list[Any]:
        """Return the results of an equation, whose transpose sums in float32.

        Args:
          eqn: the equation.
          half: per operand, whether a float32 one is read in half.
        """
        self._note_origin(eqn)
        reads = self.reads.of.get(id(eqn))
        known = facts(eqn.primitive.name)
        joins = bool(known & (Fact.BROADCASTS | Fact.JOINS))
        if reads is None:  # it has no half operands, or no derivative
            operands = [
                self._value_in_half(v, joins)[0] if is_half else self._as_written(v)
                for v, is_half in zip(eqn.invars, half, strict=True)
            ]
            return binding.bind_here(eqn, operands)
        if self.reads.is_derivative_rule and (reads.smaller or reads.sums_backward):
            (out,) = eqn.outvars
            dtype = self.half_dtype if is_f32(out) else out.aval.dtype
            return sums.in_float32(eqn, self._all_in_f32(eqn, reads), dtype)
        operands = [
            self._value_in_half(v, joins)[0]
            if i in reads.smaller
            else self._in_half(v, joins, self._like(reads, i))
            if is_half
            else self._as_written(v)
            for i, (v, is_half) in enumerate(zip(eqn.invars, reads.half, strict=True))
        ]
        if reads.smaller:
            return [self._broadcast(eqn, operands, reads)]
        if reads.sums_backward:
            return sums.bind(eqn, operands, self._all_in_f32(eqn, reads))
        return binding.bind_here(eqn, operands)

    def _multiplies(self, eqn: Any) -> bool:
        """Return whether this multiplies arrays, or divides by a smaller one."""
        name, operands = eqn.primitive.name, eqn.invars
        if name not in ("mul", "div") or self.reads.is_derivative_rule:
            return False
        if any(map(compat.is_literal, operands)) or not is_f32(eqn.outvars[0]):
            return False
        if name == "div" and operands[1].aval.size == eqn.outvars[0].aval.size:
            return False
        return self.reads.differentiated.issuperset(operands)

    def _all_in_f32(self, eqn: Any, reads: EqnReads) -> list[Any]:
        return [
            self._as_written(v)
            if not is_half
            else np.asarray(v.val, F32)
            if compat.is_literal(v)
            else self.in_f32(v)
            for v, is_half in zip(eqn.invars, reads.half, strict=True)
        ]

    def _as_written(self, var: Any) -> Any:
        if compat.is_literal(var):
            return var.val
        return self.in_f32(var) if is_f32(var) else self._made[var]

    def _in_half(self, var: Any, joins: bool = False, like: Sequence[Any] = ()) -> Any:
        """Return a value in half, differentiated as a cast of its own.

        Args:
          var: the variable, float32 or half.
          joins: whether it is combined with other values elementwise.
          like: values that `vmap` may map and it may not.
        """
        value, has_derivative = self._value_in_half(var, joins)
        if (has_derivative and not like) or var not in self.reads.differentiated:
            return value
        return sums.differentiate_as(value, self.in_f32(var), *like)

    def _value_in_half(self, var: Any, joins: bool) -> tuple[Any, bool]:
        """Return a value in half, and whether it has the derivative of this cast."""
        if compat.is_literal(var):
            value = np.asarray(var.val, self.half_dtype) if is_f32(var) else var.val
            return value, True
        value = self._made[var]
        if not is_f32(var) or value.dtype == self.half_dtype:
            return value, var not in self.reads.many
        if joins and var not in self.numbers:
            if var not in self._saturated:
                self._saturated[var] = sums.saturate(value, self.half_dtype)
            return self._saturated[var], False
        is_first = var not in self._cast or var in self._unread
        self._unread.discard(var)
        if var not in self._cast:
            self._cast[var] = lax.convert_element_type(value, self.half_dtype)
        return self._cast[var], is_first

    def _like(self, reads: EqnReads, index: int) -> Sequence[Any]:
        if (
            self.reads.is_derivative_rule
        ):  # it may be a tangent, and then so would be the result
            return ()
        return [self._made[v] for v in reads.like.get(index, ())]

    def _broadcast(self, eqn: Any, operands: list[Any], reads: EqnReads) -> Any:
        """Run an elementwise equation some of whose half operands are smaller."""
        name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
        first = reads.smaller[0]
        if len(reads.smaller) == 1 and (
            name == "mul" or (name == "div" and first == 1)
        ):
            factor = operands[first], self.in_f32(eqn.invars[first])
            return sums.scale(eqn, operands[1 - first], *factor)
        for i in reads.smaller:
            in_f32, like = self.in_f32(eqn.invars[i]), self._like(reads, i)
            operands[i] = sums.spread(operands[i], in_f32, shape, *like)
        return binding.bind_here(eqn, operands)[0]

    def _note_origin(self, eqn: Any) -> None:
        """Note where the float32 original of a half result can be had."""
        permutes = facts(eqn.primitive.name) & Fact.PERMUTES
        if eqn.primitive.name != "convert_element_type" and not permutes:
            return
        (var,), (out,) = eqn.invars, eqn.outvars
        if not sums.is_half(out) or compat.is_literal(var):
            return
        if permutes and (var in self._cast or var in self._moved_by):
            self._moved_by[out] = eqn
        elif not permutes and is_f32(var):
            self._cast[out] = self.in_f32(var)
