"""What a leaf of a state is, whether it fits another, and how it becomes it.

Nothing here knows Orbax: a leaf is described in words that JSON can hold.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite._src import compat, dtypes, trees


class Cast(NamedTuple):
    """What was done to a leaf.

    Attributes:
      from_dtype: what was saved.
      to_dtype: what it is now.
      flushed: how many numbers, too small for that dtype, became 0.
    """

    from_dtype: Any
    to_dtype: Any
    flushed: int


class Casts(dict[str, Cast]):
    """Key path to `Cast`; `str` makes a table of it."""

    def __str__(self) -> str:
        """Return a line for each leaf."""
        width = max(map(len, self), default=0)
        lines = [
            f"{path:{width}}  {cast.from_dtype} -> {cast.to_dtype}"
            + (f", {cast.flushed} became 0" if cast.flushed else "")
            for path, cast in self.items()
        ]
        return "\n".join(lines) or "no leaf was cast"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a leaf is.

    Attributes:
      kind: `"array"`, `"key"`, `"number"` (of Python), or `"object"`: not saved.
      dtype: the name of its dtype, or of the type of a number.
      shape: of a key array, that of the keys.
      weak_type: whether its dtype yields in promotion.
      impl: the implementation of a key.
      crc32: checksum of its bytes; None where no process has all of them.
    """

    kind: str
    dtype: str = ""
    shape: list[int] = dataclasses.field(default_factory=list)
    weak_type: bool = False
    impl: str | None = None
    crc32: int | None = None

    def __str__(self) -> str:
        """Return its dtype and shape, or its kind."""
        if self.kind in ("array", "key"):
            return f"{self.dtype}{self.shape}"
        return f"a Python {self.dtype}" if self.kind == "number" else "no array"


def describe(x: Any) -> Leaf:
    """Return what a leaf is; shapes and donated arrays will do."""
    if not trees.is_array(x):
        is_number = isinstance(x, bool | int | float | complex)
        return Leaf("number", type(x).__name__) if is_number else Leaf("object")
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return Leaf("key", str(x.dtype), list(x.shape))
    if _number_kind(x.dtype) is None:  # NumPy's strings and objects, and float0
        return Leaf("object")
    is_weak = bool(getattr(x, "weak_type", False))
    return Leaf("array", str(x.dtype), list(x.shape), is_weak)


def flatten(tree: Any) -> tuple[dict[str, Any], Any]:
    """Return the leaves of a tree by key path, and its structure.

    Raises:
      ValueError: two leaves have the same path.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = [trees.key_path(path) for path, _ in leaves]
    if len(set(paths)) < len(paths):
        twice = sorted({path for path in paths if paths.count(path) > 1})
        raise ValueError(f"Several leaves have the path {some(twice)}: rename one.")
    return dict(zip(paths, (leaf for _, leaf in leaves), strict=True)), structure


def check_fit(
    saved: dict[str, Leaf], wanted: dict[str, Leaf], where: str, *, cast: bool
) -> None:
    """Raise unless each saved leaf can be restored as the one that is wanted.

    Raises:
      ValueError: other paths, shapes or kinds of leaves; other dtypes, unless they are
        all floating and `cast` is set.
    """
    missing = [f"{path} ({leaf})" for path, leaf in wanted.items() if path not in saved]
    extra = [f"{path} ({leaf})" for path, leaf in saved.items() if path not in wanted]
    if missing or extra:
        raise ValueError(
            f"{where} has another structure than `like`: only the checkpoint has "
            f"{some(extra)}, only `like` has {some(missing)}."
        )
    unlike = [path for path in wanted if not _agree(saved[path], wanted[path])]
    fixed = [path for path in unlike if not is_castable(saved[path], wanted[path])]
    told = fixed or ([] if cast else unlike)
    if told:
        pairs = [f"{path} ({saved[path]}, `like` has {wanted[path]})" for path in told]
        raise ValueError(
            f"{where} does not fit `like`: it has {some(pairs)}. "
            + (
                "Only floating arrays of the same shape can be cast."
                if fixed
                else "cast=True casts them."
            )
        )


def _agree(saved: Leaf, wanted: Leaf) -> bool:
    """Return whether a leaf can be restored as it is."""
    if saved.shape != wanted.shape or saved.dtype == wanted.dtype:
        return saved.shape == wanted.shape
    # A Python number has no width.
    if {saved.kind, wanted.kind} != {"number", "array"}:
        return False
    return _number_kind(np.dtype(saved.dtype)) == _number_kind(np.dtype(wanted.dtype))


def is_castable(saved: Leaf, wanted: Leaf) -> bool:
    """Return whether a leaf has another dtype than is wanted, and can be cast."""
    if not saved.kind == wanted.kind == "array" or saved.shape != wanted.shape:
        return False
    both = np.dtype(saved.dtype), np.dtype(wanted.dtype)
    return both[0] != both[1] and all(map(dtypes.is_castable, both))


def cast_array(array: Any, dtype: Any, where: str) -> tuple[Any, Cast]:
    """Cast a floating array, on the host if it is there.

    Raises:
      ValueError: a finite number would become inf.
    """
    xp: Any = np if isinstance(array, np.ndarray) else jnp
    dtype = np.dtype(dtype)
    with np.errstate(all="ignore"):
        new = array.astype(dtype)
    lost = xp.isfinite(array) & ~xp.isfinite(new)
    if lost.any():
        largest = float(abs(xp.where(lost, array, xp.zeros_like(array))).max())
        raise ValueError(
            f"{where} does not fit into {dtype}: {int(lost.sum())} of {array.size} "
            f"numbers, up to {largest:.6g}, would become inf. Let `like` have a wider "
            "dtype there."
        )
    flushed = int(((new == 0) & (array != 0)).sum())
    return new, Cast(array.dtype, dtype, flushed)


def cast_number(array: np.ndarray, dtype: Any, where: str) -> np.ndarray:
    """Return a Python number as an array of a dtype.

    Raises:
      ValueError: the dtype cannot hold it.
    """
    if dtypes.is_castable(dtype):
        return cast_array(array, dtype, where)[0]
    try:
        return np.asarray(array.item(), dtype)
    except OverflowError:
        raise ValueError(f"{where} is {array}, beyond {dtype}.") from None


def sharding_of(target: Any) -> Any:
    """Return where a leaf has to be, None where JAX may choose."""
    # A committed scalar could not be used beside arrays on other devices.
    if isinstance(target, jax.Array) and not target.committed:
        return None
    return getattr(target, "sharding", None)


def empty(saved: Leaf, target: Any) -> Any:
    """Return the bytes of a leaf that has none; None if it has some, or never any."""
    if 0 not in saved.shape:
        return None
    data = saved
    if saved.kind == "key":
        data = jax.eval_shape(jax.random.key_data, target)
    return np.zeros(data.shape, data.dtype)


def place(array: Any, saved: Leaf, target: Any) -> Any:
    """Return an array that was read as what the target is: jax, NumPy or a number."""
    if saved.kind == "object":
        return target
    if not trees.is_array(target) and saved.kind == "number":
        return array.item()
    if isinstance(target, np.ndarray | np.generic):
        return array if isinstance(target, np.ndarray) else array[()]
    if isinstance(array, np.ndarray):
        sharding = sharding_of(target)
        array = (
            jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)
        )
    if saved.kind == "key":
        return jax.random.wrap_key_data(array, impl=saved.impl)
    is_weak = saved.weak_type if saved.kind == "array" else describe(target).weak_type
    return compat.weakly_typed(array) if is_weak else array


def some(items: Iterable[str], count: int = 4) -> str:
    """Return the first few of many, and how many more there are."""
    items = list(items)
    more = f" and {len(items) - count} more" if len(items) > count else ""
    return ", ".join(items[:count]) + more if items else "nothing"


def _number_kind(dtype: Any) -> Any:
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), None)
