"""Checks of arguments, one for each kind: what was expected, what was got, what to do.

An argument of another kind raises TypeError, one that is out of range ValueError.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

T = TypeVar("T")

MOST = 200
"""How many characters of an argument an error shows."""


def wrong(name: str, expected: str, got: object, remedy: str = "") -> str:
    """Return the sentence of an error.

    Examples:
      >>> wrong("period", "at least 1", 0, "The default is 2000.")
      'Expected period to be at least 1, got 0. The default is 2000.'
    """
    return (
        f"Expected {name} to be {expected}, got {shown(got)}.{remedy and f' {remedy}'}"
    )


def shown(got: object) -> str:
    """Return what an error shows of an argument: a line, also of an array's many."""
    text = " ".join(repr(got).split())
    return text if len(text) <= MOST else f"{text[:MOST]}…"


def flag(value: T, name: str, or_none: bool = False) -> T:
    """Return a flag: `"False"` is none."""
    if isinstance(value, bool | np.bool_) or (or_none and value is None):
        return value
    expected = "True, False or None" if or_none else "True or False"
    raise TypeError(wrong(name, expected, value))


def is_number(x: object) -> bool:
    """Return whether this is a real number whose value is known; a flag is none."""
    if isinstance(x, Tracer | bool):
        return False
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        return x.ndim == 0 and is_real(x.dtype)
    return isinstance(x, int | float)


def is_real(dtype: DTypeLike) -> bool:
    """Return whether this is a dtype of real numbers; that of flags is none."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.floating))


def number(
    value: Any,
    name: str,
    expected: str = "",
    holds: Callable[[float], bool] = lambda x: True,
) -> float:
    """Return a number that is known at trace time, as a float, of which this holds."""
    if not is_number(value):
        raise TypeError(wrong(name, "a number known at trace time", value))
    if not holds(float(value)):
        raise ValueError(wrong(name, expected, value))
    return float(value)


def count(value: object, name: str, least: int = 1) -> int:
    """Return a whole number of int32, as an int."""

    def holds(x: float) -> bool:
        return x.is_integer() and least <= x < 2**31

    return int(number(value, name, f"at least {least}, a whole int32", holds))


def one_of(value: T, name: str, options: Sequence[str | None], remedy="") -> T:
    """Return a name that is one of these."""
    if (value is None or isinstance(value, str)) and value in options:
        return value
    raise ValueError(wrong(name, f"one of {tuple(options)}", value, remedy))


def positions(value: Any, name: str, least: int = 1) -> tuple[int, ...]:
    """Return the index of an argument, or those of several."""
    given = tuple(value) if isinstance(value, tuple | list) else (value,)
    is_int = [isinstance(i, int | np.integer) and type(i) is not bool for i in given]
    if not all(is_int) or len(given) < least:
        raise TypeError(wrong(name, "the index of an argument, or several", value))
    return given


def text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(wrong(name, "a string", value))
    return value


def function(value: object, what: str) -> None:
    if not callable(value):
        raise TypeError(f"Expected a function to {what}, got {shown(value)}.")


def mapping(value: object, name: str, of: str) -> Mapping[Any, Any]:
    """Return a mapping; None is an empty one."""
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise TypeError(wrong(name, f"a mapping of {of}", value))
    return value


def array(value: Any) -> jax.Array | None:
    """Return a value as JAX' array, None if it is no such."""
    if isinstance(value, str | bytes):  # NumPy would take it for the name of a dtype
        return None
    try:
        return jnp.asarray(value)
    except (OverflowError, TypeError, ValueError):
        return None
