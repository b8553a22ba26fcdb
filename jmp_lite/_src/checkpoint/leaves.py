"""Leaves of a state: their specs, compatibility checks and conversions.

A spec can be stored as JSON. This module does not depend on Orbax.
"""

import base64
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite._src import compat, dtypes, trees
from jmp_lite._src.reports import printable, summarize


class Cast(NamedTuple):
    """The cast of a leaf by `restore`.

    Attributes:
      from_dtype: the dtype that was saved.
      to_dtype: the dtype that was restored.
      underflowed: how many non-zero numbers became 0.
    """

    from_dtype: Any
    to_dtype: Any
    underflowed: int


class Casts(dict[str, Cast]):
    """The casts of `restore`, a dict of key path to `Cast`; `str` returns a table."""

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        lines = [
            f"{printable(path):{width}}  {cast.from_dtype} -> {cast.to_dtype}"
            + (f", {cast.underflowed} became 0" if cast.underflowed else "")
            for path, cast in self.items()
        ]
        return "\n".join(lines) or "no leaf was cast"


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    # "array", "key", "number" (a Python scalar), "text" (a string or bytes), or
    # "object" (not saved).
    kind: str
    dtype: str = ""  # the name of its dtype, or of the Python type of a number or text
    shape: list[int] = dataclasses.field(default_factory=list)  # of a key: of its keys
    weak_type: bool = False
    impl: str | None = None  # of a PRNG key
    crc32: int | None = None  # of its bytes; None if no process holds all of them
    text: str | None = None  # the string, or the bytes in base64

    def __str__(self) -> str:
        if self.kind in ("array", "key"):
            return f"{self.dtype}{self.shape}"
        return f"a Python {self.dtype}" if self.dtype else "no array"


def describe(x: Any) -> LeafSpec:
    """Return the spec of a leaf: an array, `ShapeDtypeStruct` or donated array."""
    if isinstance(x, bytes):  # before arrays: np.str_ and np.bytes_ are both
        return LeafSpec("text", "bytes", text=base64.b64encode(x).decode())
    if isinstance(x, str):
        return LeafSpec("text", "str", text=x)
    if not trees.is_array(x):
        is_number = isinstance(x, bool | int | float | complex)
        return LeafSpec("number", type(x).__name__) if is_number else LeafSpec("object")
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return LeafSpec("key", str(x.dtype), list(x.shape))
    if _number_kind(x.dtype) is None:  # NumPy's strings and objects, and float0
        return LeafSpec("object")
    is_weak = bool(getattr(x, "weak_type", False))
    name = np.dtype(x.dtype).newbyteorder("=").name
    return LeafSpec("array", name, list(x.shape), is_weak)


def flatten(tree: Any) -> tuple[dict[str, Any], Any]:
    """Return a dict of key path to leaf, and the structure of the tree."""
    leaves, structure = jax.tree.flatten_with_path(tree)
    paths = [trees.key_path(path) for path, _ in leaves]
    if len(set(paths)) < len(paths):
        twice = sorted({path for path in paths if paths.count(path) > 1})
        raise ValueError(
            f"Several leaves have the path {summarize(twice)}: rename one."
        )
    return dict(zip(paths, (leaf for _, leaf in leaves), strict=True)), structure


def check_compatible(
    saved: dict[str, LeafSpec], wanted: dict[str, LeafSpec], where: str, *, cast: bool
) -> None:
    missing = [f"{path} ({leaf})" for path, leaf in wanted.items() if path not in saved]
    extra = [f"{path} ({leaf})" for path, leaf in saved.items() if path not in wanted]
    if missing or extra:
        raise ValueError(
            f"{where} and `like` differ in structure: only the checkpoint has "
            f"{summarize(extra)}, only `like` has {summarize(missing)}."
        )
    unlike = [path for path in wanted if not _matches(saved[path], wanted[path])]
    fixed = [path for path in unlike if not is_castable(saved[path], wanted[path])]
    told = fixed or ([] if cast else unlike)
    if told:
        pairs = [f"{path} ({saved[path]}, `like` has {wanted[path]})" for path in told]
        advice = "cast=True casts them."
        if fixed:
            advice = "Only floating arrays of the same shape can be cast."
        raise ValueError(
            f"{where} does not match `like`: it has {summarize(pairs)}. {advice}"
        )


def _matches(saved: LeafSpec, wanted: LeafSpec) -> bool:
    """Return whether a leaf can be restored without a cast."""
    if saved.shape != wanted.shape or saved.dtype == wanted.dtype:
        return saved.shape == wanted.shape
    # A Python number matches arrays of its kind, of any width.
    if {saved.kind, wanted.kind} != {"number", "array"}:
        return False
    return _number_kind(np.dtype(saved.dtype)) == _number_kind(np.dtype(wanted.dtype))


def is_castable(saved: LeafSpec, wanted: LeafSpec) -> bool:
    """Return whether two floating arrays have the same shape and different dtypes."""
    if not saved.kind == wanted.kind == "array" or saved.shape != wanted.shape:
        return False
    both = np.dtype(saved.dtype), np.dtype(wanted.dtype)
    return both[0] != both[1] and all(map(dtypes.is_castable, both))


def cast_array(array: Any, dtype: Any, where: str) -> tuple[Any, Cast]:
    """Cast a floating array, a NumPy array on the host."""
    xp: Any = np if isinstance(array, np.ndarray) else jnp
    dtype = np.dtype(dtype)
    with np.errstate(all="ignore"):
        new = array.astype(dtype)
    overflowed = xp.isfinite(array) & ~xp.isfinite(new)
    if overflowed.any():
        largest = float(abs(xp.where(overflowed, array, xp.zeros_like(array))).max())
        raise ValueError(
            f"{where} overflows {dtype}: {int(overflowed.sum())} of {array.size} "
            f"numbers, up to {largest:.6g}, would become inf. Use a wider dtype in "
            "`like`."
        )
    underflowed = int(((new == 0) & (array != 0)).sum())
    return new, Cast(array.dtype, dtype, underflowed)


def cast_number(array: np.ndarray, dtype: Any, where: str) -> np.ndarray:
    """Convert a Python number, read as an array, to a dtype."""
    if dtypes.is_castable(dtype):
        return cast_array(array, dtype, where)[0]
    try:
        return np.asarray(array.item(), dtype)
    except OverflowError:
        raise ValueError(f"{where} is {array}, out of range of {dtype}.") from None


def sharding_of(target: Any) -> Any:
    """Return the sharding for a restored leaf, or None for the default device."""
    # A restored array would be committed, and fail with arrays on other devices.
    if isinstance(target, jax.Array) and not target.committed:
        return None
    return getattr(target, "sharding", None)


def empty_array(saved: LeafSpec, target: Any) -> Any:
    """Return the array of a leaf without elements; None if the leaf has elements."""
    if 0 not in saved.shape:
        return None
    is_key = saved.kind == "key"
    data = jax.eval_shape(jax.random.key_data, target) if is_key else saved
    return np.zeros(data.shape, data.dtype)


def to_target(array: Any, saved: LeafSpec, target: Any, where: str) -> Any:
    """Convert a restored leaf to the target: an array, a number, text or an object."""
    if saved.kind == "object":
        return target
    if saved.text is not None:
        is_bytes = saved.dtype == "bytes"
        return base64.b64decode(saved.text) if is_bytes else saved.text
    if not trees.is_array(target) and saved.kind == "number":
        return array.item()
    if isinstance(target, np.ndarray | np.generic):
        return array if isinstance(target, np.ndarray) else array[()]
    if array.dtype != jax.dtypes.canonicalize_dtype(array.dtype):
        raise ValueError(
            f"{where} is {array.dtype}, which JAX has only with jax_enable_x64: pass a "
            "NumPy array in `like`."
        )
    if isinstance(array, np.ndarray):
        array = jax.device_put(array, sharding_of(target))
    if saved.kind == "key":
        return jax.random.wrap_key_data(array, impl=saved.impl)
    is_weak = saved.weak_type if saved.kind == "array" else describe(target).weak_type
    return compat.weakly_typed(array) if is_weak else array


def _number_kind(dtype: Any) -> Any:
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), None)
