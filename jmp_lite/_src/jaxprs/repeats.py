"""Trace what repeats in a program once, as the layers of a model that are all alike.

JAX differentiates each equation of a program that is written out, but a function that
is called twice only once. Here, equal pieces of a jaxpr are calls of one function. JAX
puts its equations in the place of each call, so the program that comes out is the same.
"""

import collections
import itertools
import re
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
from jax import Array

from jmp_lite._src import compat
from jmp_lite._src.compat import SourceInfo
from jmp_lite._src.jaxprs import binding, core, name_scopes, sources
from jmp_lite._src.jaxprs.core import Eqn, Jaxpr, Var, variables
from jmp_lite._src.jaxprs.structure import Numbers, numbering, structure

# A program of fewer equations is traced as it is.
LEAST_EQNS = 64
# A jaxpr is cut where the hash of this many last equations is the smallest among all
# places within this distance.
_LOOKS_AT, _DISTANCE = 4, 16
_LAYER = re.compile(r"[^\d]*\d[^/]*")


class Piece(NamedTuple):
    """Equations that follow each other in a jaxpr; it has the fields of one."""

    around: SourceInfo  # the scope that all share
    eqns: Sequence[Eqn]  # in the scopes inside of that
    invars: Sequence[Var]
    outvars: Sequence[Var]
    constvars: tuple[()] = ()

    def run(self, args: Sequence[Array]) -> list[Array]:
        return binding.evaluate(self, (), args)


def run(fun: Callable[..., list[Array]], args: Sequence[Array]) -> list[Array]:
    """Return what a function of arrays returns, without effects; equal pieces share."""
    closed = jax.make_jaxpr(fun)(*args)
    jaxpr, consts = compat.open_jaxpr(closed), compat.consts_of(closed)
    values: dict[Var, Array] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    number = numbering(place)
    pieces = cut(jaxpr, number)
    keys = [structure(piece, place, number=number) for piece in pieces]
    times = collections.Counter(keys)
    shared: dict[Hashable, Callable[..., list[Array]]] = {}
    for piece, key in zip(pieces, keys, strict=True):
        call = piece.run
        if times[key] > 1:
            call = shared.setdefault(key, jax.jit(call, inline=compat.INLINE))
        with compat.source_context(piece.around):
            results = call([values[v] for v in piece.invars])
        values.update(zip(piece.outvars, results, strict=True))
    return [v.val if compat.is_literal(v) else values[v] for v in jaxpr.outvars]


def cut(jaxpr: Jaxpr, number: Numbers) -> list[Piece]:
    """Cut a jaxpr into pieces: where its equations repeat, into equal ones.

    A few equations decide whether a cut is behind them, so equal sequences have equal
    cuts. An equation that is like no other is a piece of its own, and no piece is in
    two layers.
    """
    eqns, keys = jaxpr.eqns, _keys(jaxpr.eqns, number)
    hashes = _hashes_before(eqns, _LOOKS_AT)
    times = collections.Counter(key for _, key in keys)
    alone = [times[key] == 1 for _, key in keys]
    ends = [
        i
        for i in range(1, len(eqns))
        if hashes[i] == min(hashes[max(i - _DISTANCE, 0) : i + _DISTANCE + 1])
        or alone[i - 1]
        or alone[i]
        or keys[i - 1][0] != keys[i][0]
    ]
    later, pieces = set(variables(jaxpr.outvars)), []
    for start, end in reversed([*itertools.pairwise([0, *ends, len(eqns)])]):
        made = dict.fromkeys(v for eqn in eqns[start:end] for v in eqn.outvars)
        read = (v for eqn in eqns[start:end] for v in variables(eqn.invars))
        invars = [v for v in dict.fromkeys(read) if v not in made]
        around, inside = name_scopes.split(eqns[start:end])
        outvars = [v for v in made if v in later]
        pieces.append(Piece(around, inside, invars, outvars))
        later.update(invars)
    return pieces[::-1]


def place(eqn: Eqn) -> tuple[Hashable, Sequence[Var]]:
    """Return where an equation is, as `structure` asks for it."""
    return (name_scopes.of(eqn), sources.source_line(eqn)), ()


def _nothing(_: Eqn) -> tuple[None, tuple[()]]:
    return None, ()


def _keys(eqns: Sequence[Eqn], number: Numbers) -> list[tuple[str, Hashable]]:
    """Return the layer of each equation, and what is equal for those that look alike.

    A layer is a scope with a number, as `layer_3`.
    """
    found = []
    for eqn in eqns:
        scope = name_scopes.of(eqn)
        layer = _LAYER.match(scope)
        end = layer.end() if layer else 0
        piece = Piece(eqn.source_info, [eqn], list(variables(eqn.invars)), eqn.outvars)
        inside = scope[end:], sources.source_line(eqn)
        key = inside, structure(piece, _nothing, number=number)
        found.append((scope[:end], key))
    return found


def _hashes_before(eqns: Sequence[Eqn], count: int) -> list[int]:
    """Return for each place between equations a hash of so many before it.

    It is the same in each process, and so is the program.
    """
    looks = [
        repr((eqn.primitive.name, [core.shape(v) for v in eqn.outvars])) for eqn in eqns
    ]
    places = range(len(eqns) + 1)
    return [zlib.crc32("".join(looks[max(i - count, 0) : i]).encode()) for i in places]
