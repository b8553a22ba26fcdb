"""A plugin of pytest: what other libraries transform with JAX runs through `autocast`.

`peers_suites.py` runs the tests of the libraries with it. It replaces `jax.jit`,
`jax.grad`, `jax.value_and_grad` and `jax.vjp`, which jmp_lite itself never does. What
autocast returns must have the shapes, dtypes, weak types and tree structure that the
function returned while autocast traced it.

Limits: a function that needs the values of its arguments runs as it is.
"""

import functools
import json
import numbers
import os
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jmp_lite import autocast
from jmp_lite._src.autocast.transform import NEEDS_VALUES
from jmp_lite.ops import OpRules

MODE = os.environ["THROUGH_AUTOCAST"]  # as_is, unchanged or bfloat16
RULES = OpRules.only({}) if MODE == "unchanged" else None
ARRAYS = jax.Array, np.ndarray, np.generic
NUMERIC = *ARRAYS, jax.Ref, numbers.Number
outcomes: dict[str, list[str]] = {}


class DiffersError(Exception):
    """What autocast returned has other types or another structure."""


def _types(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    types = [
        (x.shape, str(x.dtype), getattr(x, "weak_type", False))
        if isinstance(x, ARRAYS)
        else type(x)
        for x in leaves
    ]
    return structure, types


@functools.cache  # JAX compiles once for the same function
def through(fun: Any) -> Any:
    """Return the function under autocast."""

    @functools.wraps(fun, updated=())
    def routed(*args, **kwargs):
        # An argument may be static (a string, a module): only its numbers are passed.
        leaves, structure = jax.tree.flatten((args, kwargs))
        numeric = {i: x for i, x in enumerate(leaves) if isinstance(x, NUMERIC)}
        plain = None

        def of_numeric(numeric):
            nonlocal plain
            filled = [numeric.get(i, leaf) for i, leaf in enumerate(leaves)]
            all_args, all_kwargs = jax.tree.unflatten(structure, filled)
            out = fun(*all_args, **all_kwargs)
            plain = _types(out)
            return out

        half = autocast(of_numeric, "mixed_bfloat16", rules=RULES)
        try:
            with warnings.catch_warnings():  # no product is no mistake here
                warnings.filterwarnings("ignore", module=__name__)
                out = half(numeric)
        except NEEDS_VALUES:
            return fun(*args, **kwargs)
        if _types(out) != plain:
            raise DiffersError(f"expected {plain}, got {_types(out)}")
        return out

    return routed


def _patched(transformation: Any) -> Any:
    @functools.wraps(transformation)
    def patched(*args, **kwargs):
        if not args and "fun" not in kwargs:  # a decorator
            return functools.partial(patched, **kwargs)
        fun, *args = args or [kwargs.pop("fun")]
        try:
            fun = through(fun)
        except TypeError:  # not hashable
            fun = through.__wrapped__(fun)
        return transformation(fun, *args, **kwargs)

    return patched


for name in ("jit", "grad", "value_and_grad", "vjp") if MODE != "as_is" else ():
    setattr(jax, name, _patched(getattr(jax, name)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Note the outcome of each test, and the error."""
    report = yield
    if report.failed:
        outcomes[item.nodeid] = [call.excinfo.typename, str(call.excinfo.value)]
    elif report.when == "call":
        outcomes[item.nodeid] = [report.outcome]
    return report


def pytest_sessionfinish():
    """Write what was noted."""
    Path(os.environ["THROUGH_AUTOCAST_OUT"]).write_text(json.dumps(outcomes))
