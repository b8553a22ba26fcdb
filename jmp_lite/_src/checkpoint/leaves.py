"""Leaves of a state: their specs, compatibility checks and conversions."""

import base64
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_lite._src import compat, trees
from jmp_lite._src.reports import printable, summarize

_FLOATS = ("bfloat16", "float16", "float32", "float64")
# Numbers of Python: the dtypes of their kind, and those on disk.
_NUMBERS: dict[str, tuple[DTypeLike, tuple[str, ...]]] = {
    "bool": (jnp.bool_, ("bool",)),
    "int": (jnp.integer, ("int64", "uint64")),
    "float": (jnp.floating, ("float64",)),
    "complex": (jnp.complexfloating, ("complex128",)),
}


class Cast(NamedTuple):
    """The cast of a leaf by `restore`.

    Attributes:
      from_dtype: the dtype that was saved.
      to_dtype: the dtype that was restored.
      underflowed: how many non-zero numbers became 0.
    """

    from_dtype: np.dtype | str
    to_dtype: np.dtype | str
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

    @property
    def is_stored(self) -> bool:
        """Whether it is an array on disk. Orbax does not save one without elements."""
        return self.kind not in ("object", "text") and 0 not in self.shape


Specs = dict[str, LeafSpec]  # by key path


def describe(x: Any) -> LeafSpec:
    """Return the spec of a leaf: an array, `ShapeDtypeStruct` or donated array."""
    if isinstance(x, bytes):  # before arrays: np.str_ and np.bytes_ are both
        return LeafSpec("text", "bytes", text=base64.b64encode(x).decode())
    if isinstance(x, str):
        return LeafSpec("text", "str", text=x)
    if not trees.is_array(x) or x.dtype == jax.dtypes.float0:
        is_number = isinstance(x, bool | int | float | complex)
        return LeafSpec("number", type(x).__name__) if is_number else LeafSpec("object")
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return LeafSpec("key", str(x.dtype), list(x.shape))
    is_weak = bool(getattr(x, "weak_type", False))
    name = np.dtype(x.dtype).newbyteorder("=").name
    return LeafSpec("array", name, list(x.shape), is_weak)


def flatten(tree: object) -> tuple[dict[str, Any], Any]:
    """Return a dict of key path to leaf, and the structure of the tree."""
    leaves, structure = jax.tree.flatten_with_path(tree)
    paths = [trees.key_path(path) for path, _ in leaves]
    if len(set(paths)) < len(paths):
        same = sorted({path for path in paths if paths.count(path) > 1})
        raise ValueError(f"Several leaves have the path {summarize(same)}: rename one.")
    return dict(zip(paths, (leaf for _, leaf in leaves), strict=True)), structure


def check_compatible(saved: Specs, wanted: Specs, where: str, *, cast: bool) -> None:
    sides = ("the checkpoint", saved, wanted), ("`like`", wanted, saved)
    differ = []
    for side, ours, others in sides:
        # A tree that is one leaf has the path "".
        if told := [f"{x} ({ours[x]})".lstrip() for x in ours if x not in others]:
            differ.append(f"only {side} has {summarize(told)}")
    if differ:
        raise ValueError(
            f"{where} and `like` differ in structure: {', '.join(differ)}. Restore "
            "into what was saved, then change it."
        )
    unlike = [path for path in wanted if not _matches(saved[path], wanted[path])]
    fixed = [path for path in unlike if not _is_castable(saved[path], wanted[path])]
    if told := fixed or ([] if cast else unlike):
        pairs = [f"{path} ({saved[path]}, `like` has {wanted[path]})" for path in told]
        only = "Only floating arrays of the same shape can be cast."
        advice = only if fixed else "cast=True casts them."
        raise ValueError(
            f"{where} does not match `like`: it has {summarize(pairs)}. {advice}"
        )


def _matches(saved: LeafSpec, wanted: LeafSpec) -> bool:
    """Return whether a leaf can be restored without a cast."""
    if saved.shape != wanted.shape or saved.kind == wanted.kind:
        return (saved.shape, saved.dtype) == (wanted.shape, wanted.dtype)
    # A Python number matches arrays of its kind, of any width.
    number, array = (saved, wanted) if wanted.kind == "array" else (wanted, saved)
    if (number.kind, array.kind) != ("number", "array") or number.dtype not in _NUMBERS:
        return False
    return jnp.issubdtype(np.dtype(array.dtype), _NUMBERS[number.dtype][0])


def _is_castable(saved: LeafSpec, wanted: LeafSpec) -> bool:
    """Return whether two floating arrays have the same shape."""
    is_alike = (saved.kind, saved.shape) == ("array", wanted.shape)
    return is_alike and saved.dtype in _FLOATS and wanted.dtype in _FLOATS


def stored_as(leaf: LeafSpec, target: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the shape of a leaf's array on disk, and the dtypes it may have there."""
    if leaf.kind == "key":
        return jax.eval_shape(jax.random.key_data, target).shape, ("uint32",)
    if leaf.kind == "number":
        every = [dtype for _, names in _NUMBERS.values() for dtype in names]
        return (), _NUMBERS.get(leaf.dtype, (None, tuple(every)))[1]
    # Orbax does not support all fp8 and int4 dtypes.
    is_small = np.dtype(leaf.dtype).kind == "V" and np.dtype(leaf.dtype).itemsize == 1
    shape = target.shape if trees.is_array(target) else ()
    return shape, (leaf.dtype, "uint8") if is_small else (leaf.dtype,)


def decode(array: Any, leaf: LeafSpec, target: Any) -> Any:
    """Return the value of a saved leaf, that of `target` if it was not saved.

    Any exception means that the leaf is damaged.
    """
    if leaf.kind == "key":
        key = jax.random.wrap_key_data(array, impl=leaf.impl)
        if key.dtype != target.dtype:
            raise ValueError(f"{leaf.impl} is not the implementation of {leaf.dtype}")
        return key
    if leaf.kind != "text":
        return target if leaf.kind == "object" else array
    if not isinstance(leaf.text, str):
        raise ValueError(f"expected a text, got {leaf.text}")
    is_bytes = leaf.dtype == "bytes"
    return base64.b64decode(leaf.text, validate=True) if is_bytes else leaf.text


def to_target(
    value: Any, saved: LeafSpec, target: Any, where: str
) -> tuple[Any, Cast | None]:
    """Convert a saved value to its counterpart in `like`; return it and its cast."""
    if saved.kind in ("object", "text"):
        return value, None
    if saved.kind == "number" and not trees.is_array(target):
        return value.item(), None
    wanted, cast = describe(target), None
    if wanted.kind == "array" and value.dtype.name != wanted.dtype:
        value, cast = cast_array(value, np.dtype(wanted.dtype), where)
        cast = cast if saved.kind == "array" else None
    if isinstance(target, np.ndarray):
        return value, cast
    if isinstance(target, np.generic):
        return value[()], cast
    dtype = value.dtype
    if dtype != jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True):
        if wanted.kind == "number":
            return value.item(), None
        raise ValueError(
            f"{where} is {dtype}, which JAX has only with jax_enable_x64: pass a "
            "NumPy array in `like`."
        )
    value = jax.device_put(value, sharding_of(target))
    is_weak = saved.weak_type if saved.kind == "array" else wanted.weak_type
    return (compat.weakly_typed(value) if is_weak else value), cast


def cast_array(array: Any, dtype: np.dtype, where: str) -> tuple[Any, Cast]:
    """Cast an array to a dtype of its kind; raise if a finite number is lost."""
    xp: Any = np if isinstance(array, np.ndarray) else jnp
    with np.errstate(all="ignore"):
        new = array.astype(dtype)
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    lost = xp.isfinite(array) & ~xp.isfinite(new) if is_inexact else new != array
    if lost.any():
        largest = float(abs(xp.where(lost, array, xp.zeros_like(array))).max())
        raise ValueError(
            f"{where} overflows {dtype}: {int(lost.sum())} of {array.size} numbers, up "
            f"to {largest:.6g}. Use a wider dtype in `like`."
        )
    underflowed = int(((new == 0) & (array != 0)).sum())
    return new, Cast(array.dtype, np.dtype(dtype), underflowed)


def sharding_of(target: object) -> jax.sharding.Sharding | None:
    """Return the sharding for a restored leaf, or None for the default device."""
    # A restored array would be committed, and fail with arrays on other devices.
    if isinstance(target, jax.Array) and not target.committed:
        return None
    return getattr(target, "sharding", None)
