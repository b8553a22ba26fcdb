"""Calls of `in_half` functions in a program that autocast traces.

    in_half(kernel)(q, k, v)

    scope jmp_lite_in_half:
      a, b, c = convert_element_type q, k, v     float32 -> half, a boundary
      d       = jit[kernel] a b c                as the program has it
      o       = convert_element_type d           half -> float32, a boundary

The program stays one in float32 around the call, and JAX differentiates, maps and
scans all of it as any other. Where autocast holds a value in half, a boundary is that
value. `autocast` says by a context of JAX that it traces, which is a part of the key of
every cache of traces. Name scopes are known later than that, so under a policy with
float32 scopes a call is a condition with two branches, in half and as it is written,
and `choose` leaves one of them.
"""

import contextlib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_lite._src import compat
from jmp_lite._src.jaxprs import binding, core, name_scopes
from jmp_lite._src.jaxprs.core import F32, ClosedJaxpr, Eqn
from jmp_lite._src.jaxprs.primitives import CAST
from jmp_lite._src.jaxprs.tracing import Traced, fill, is_traceable, trace
from jmp_lite._src.trees import KeyPath, PyTree

REASON = "in_half"


class Tracing(NamedTuple):
    """How autocast traces."""

    half_dtype: str  # its name
    by_scope: bool  # whether some scopes compute in float32


# Holds a `Tracing`, or None where no autocast traces.
_context = jax.make_user_context(default_value=None)


def outside() -> contextlib.AbstractContextManager[None]:
    """Return a context in which `in_half` functions are called as they are."""
    return _context(None)


@contextlib.contextmanager
def inside(half_dtype: DTypeLike, by_scope: bool = False) -> Iterator[None]:
    """Enter a context in which `in_half` functions get half arrays.

    An exception that names a dtype gets a note of `in_half`.
    """
    try:
        with _context(Tracing(np.dtype(half_dtype).name, by_scope)):
            yield
    except Exception as error:
        is_noted = any(REASON in note for note in getattr(error, "__notes__", ()))
        is_assertion = isinstance(error, AssertionError) and not str(error)
        if not is_noted and (is_assertion or _DTYPES.search(str(error))):
            error.add_note(
                "The function is traced with float32 arrays. A kernel that demands "
                "half precision gets it by jmp_lite.in_half: call in_half(kernel)(...) "
                "in place of kernel(...)."
            )
        raise


# What an error names that is about a dtype; one about shapes names "float32[8]".
_DTYPES = re.compile(r"\bdtypes?\b|fp16|float16|\bhalf\b|(fp|float|\bf)32(?!\[)", re.I)


def current() -> Tracing | None:
    """Return how the autocast traces that calls this; None outside of autocast."""
    return _context.value


def excepted(except_: Any, fun: Callable[..., Any], name: str) -> Callable[[Any], bool]:
    """Return whether the argument at a key path of `(args, kwargs)` is an exception.

    Raises as `in_half` does.
    """
    is_one = isinstance(except_, str) or not np.iterable(except_)
    given: tuple[Any, ...] = (except_,) if is_one else tuple(except_)
    if any(isinstance(x, bool) or not isinstance(x, str | int) for x in given):
        raise TypeError(
            "in_half expects names or positions of arguments as except_, such as "
            f"('bias',), got {except_!r}."
        )
    try:
        parameters = inspect.signature(fun).parameters.values()
    except ValueError:  # functions of C have none
        parameters = inspect.signature(lambda *args, **kwargs: None).parameters.values()
    kinds = {p.kind for p in parameters}
    named = [p.name for p in parameters if p.kind not in (_ANY_NUMBER, _ANY_NAME)]
    positional = [p.name for p in parameters if p.kind < _ANY_NUMBER]
    for x in given:
        if isinstance(x, str):
            is_known = x in named or _ANY_NAME in kinds
        else:
            is_known = 0 <= x < len(positional) or (x >= 0 and _ANY_NUMBER in kinds)
        if not is_known:
            raise ValueError(
                f"in_half: {name} has no argument {x!r}, which except_ names: it has "
                f"{', '.join(named)}."
            )
    names = {dict(enumerate(positional)).get(x, x) for x in given}
    places = {positional.index(x) if x in positional else x for x in given}

    def is_excepted(path: KeyPath) -> bool:
        in_args, argument = path[0].idx == 0, path[1]
        return argument.idx in places if in_args else argument.key in names

    return is_excepted


_ANY_NAME = inspect.Parameter.VAR_KEYWORD
_ANY_NUMBER = inspect.Parameter.VAR_POSITIONAL


def call(
    fun: Callable[..., PyTree],
    name: str,
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    how: Tracing,
    is_excepted: Callable[[KeyPath], bool],
) -> PyTree:
    """Call a function with its float32 arrays in half, and mark what it does.

    The argument at a key path of `(args, kwargs)` that `is_excepted` stays as it is.
    """
    half_dtype = np.dtype(how.half_dtype)
    paths, tree = jax.tree.flatten_with_path((tuple(args), kwargs))
    # NumPy's scalars are numbers, which a kernel may need the value of.
    arrays = {
        i: leaf
        for i, (_, leaf) in enumerate(paths)
        if is_traceable(leaf) and not isinstance(leaf, np.generic)
    }
    cast = [i for i, x in arrays.items() if x.dtype == F32]
    cast = [i for i in cast if not is_excepted(paths[i][0])]
    if not cast:
        return fun(*args, **kwargs)
    # Nor is the value of other NumPy arrays hidden.
    given = {i: x for i, x in arrays.items() if i in cast or isinstance(x, jax.Array)}

    @functools.wraps(fun, updated=())
    def of_arrays(*values):
        args, kwargs = fill(tree, [leaf for _, leaf in paths], given, values)
        return fun(*args, **kwargs)

    def in_half(out_dtypes=None):
        with jax.named_scope(name_scopes.IN_HALF), outside():
            low = [
                lax.convert_element_type(x, half_dtype) if i in cast else x
                for i, x in given.items()
            ]
            try:
                traced = trace(of_arrays, low)
            except Exception as error:
                error.add_note(f"in_half called {name} with {half_dtype.name} arrays.")
                raise
            outs = _call(traced, name)
            dtypes = [F32 if out.dtype == half_dtype else out.dtype for out in outs]
            pairs = zip(outs, out_dtypes or dtypes, strict=True)
            return list(itertools.starmap(lax.convert_element_type, pairs)), traced

    as_written = None
    if how.by_scope:
        # If it takes half alone, `choose` says so where that is wrong.
        with contextlib.suppress(Exception), outside():
            as_written = trace(of_arrays, list(given.values()))
    if as_written is None:
        outs, traced = in_half()
        return traced.restore(outs)
    out_dtypes = [aval.dtype for aval in as_written.closed.out_avals]
    with jax.named_scope(name_scopes.IN_HALF):
        # As branches, these are in the other order.
        outs = lax.cond(
            False, lambda: _call(as_written, name), lambda: in_half(out_dtypes)[0]
        )
    return as_written.restore(outs)


def _call(traced: Traced, name: str) -> list[jax.Array]:
    """Run a traced function, as one equation of its name in the jaxpr."""
    jaxpr, consts = compat.open_jaxpr(traced.closed), compat.consts_of(traced.closed)

    def kernel(*arrays):
        return binding.evaluate(jaxpr, consts, arrays)

    kernel.__name__ = name
    with jax.named_scope(name_scopes.FULL_PRECISION):  # as it is written
        return jax.jit(kernel)(*traced.args)


# What is marked, in the jaxpr.


def name_of_kernel(eqn: Eqn) -> str:
    """Return the name of the function that an equation calls, "" if it is no call."""
    return eqn.params["name"] if eqn.primitive.name == "jit" else ""


def is_cast(eqn: Eqn) -> bool:
    """Return whether an equation casts between float32 and half."""
    if eqn.primitive.name != CAST:
        return False
    ends = *eqn.invars, *eqn.outvars
    return any(map(core.is_f32, ends)) and any(map(core.is_half, ends))


def is_boundary(eqn: Eqn) -> bool:
    """Return whether an equation casts an argument or a result of a call."""
    return is_cast(eqn) and _ends_in_mark(eqn)


def is_choice(eqn: Eqn) -> bool:
    """Return whether an equation is a call, in half or as it is written."""
    return eqn.primitive.name == "cond" and _ends_in_mark(eqn)


def _ends_in_mark(eqn: Eqn) -> bool:
    return _parts(eqn)[-1:] == [name_scopes.IN_HALF]


def _parts(eqn: Eqn) -> list[str]:
    return name_scopes.clean(name_scopes.of(eqn)).split("/")


def choose(closed: ClosedJaxpr, is_half: Callable[[str, str], bool]) -> ClosedJaxpr:
    """Return a jaxpr whose calls of `in_half` functions have the branch of their scope.

    What is in a scope, and in a name stack inside of it, is in half if it `is_half`.

    Raises:
      ValueError: a function that takes half alone is called in a scope in float32.
    """

    @functools.cache  # equal sub-jaxprs stay one object
    def in_scope(jaxpr, scope):
        eqns = compat.open_jaxpr(jaxpr).eqns
        made = [chosen(eqn, scope) for eqn in eqns]
        is_same = all(a is b for a, b in zip(eqns, made, strict=True))
        return jaxpr if is_same else compat.with_eqns(jaxpr, made)

    def chosen(eqn: Eqn, scope: str) -> Eqn:
        stack = name_scopes.of(eqn)
        if is_choice(eqn):
            branch = eqn.params["branches"][0 if is_half(scope, stack) else -1]
            return eqn.replace(params={**eqn.params, "branches": (branch,)})
        is_call = name_of_kernel(eqn) and name_scopes.IN_HALF in _parts(eqn)
        if is_call and not is_half(scope, stack):
            layer = name_scopes.without_marks(name_scopes.join(scope, stack))
            raise ValueError(
                f"in_half: {name_of_kernel(eqn)} does not run on float32 arrays, and "
                f"the policy computes in float32 in its scope {layer!r}."
            )
        inside = name_scopes.join(scope, stack)
        return core.map_jaxprs(eqn, lambda jaxpr: in_scope(jaxpr, inside))

    return in_scope(closed, "")
