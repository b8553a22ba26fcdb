"""Statistics of a tree, leaf by leaf: parameters, gradients, activations."""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from jmp_lite._src import dtypes, reports, trees
from jmp_lite._src.numerics.stats import (
    EXPONENTS,
    ValueStats,
    empty,
    merge_stacked,
    value_stats,
)


@trees.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreeStats(reports.Report):
    """The statistics of each floating leaf of a tree.

    A pytree: returned from `jit`, stacked by `scan`, fetched with `jax.device_get`.
    Call `named`, `table`, `plot` and `to_json` on the host; `from_json` returns NumPy
    arrays.

    Args:
      stats: those of the leaves, stacked: fields f32 `[n]`, a histogram `[n, 96]`.
      paths: the key path of each leaf, `"decoder/layers/0/kernel"`; of several that
        have the same one, as a key has a slash, `"['a/b']"`, `"['a']['b']"`; static.
      dtype: the dtype that the numbers would be in; static.

    Examples:
      >>> stats = tree_stats({"w": jnp.array([1e-9, 0.5])}, "f16")
      >>> TreeStats.from_json(stats.to_json()).named()["w"].underflow.item()
      1.0
    """

    stats: ValueStats
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})

    def total(self) -> ValueStats:
        """Return the statistics of all leaves together, fields `[]`; works in `jit`."""
        return merge_stacked(self.stats)

    def named(self) -> dict[str, ValueStats]:
        """Return the statistics of each leaf by its path, as NumPy scalars.

        Raises:
          ValueError: these are of several steps, stacked by `scan` or `vmap`.
        """
        stats = trees.on_host(self.stats)
        if stats.size.ndim != 1:
            raise ValueError(
                "Expected the statistics of one step, got them stacked to "
                f"{list(stats.size.shape)}: take step i of them with "
                "jax.tree.map(lambda x: x[i], stats)."
            )
        return {
            path: jax.tree.map(lambda x, i=i: x[i], stats)
            for i, path in enumerate(self.paths)
        }

    def _text(self):
        # The table, if these are concrete and of one step.
        is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(self.stats))
        is_shown = not is_traced and self.stats.size.ndim == 1
        return super()._text() if is_shown else repr(self).split("\n")

    def _table(self, every):
        numbers = ("size", *_SHARES.values(), "log2|x|")
        # All shares but that of zeros, which half keeps.
        worst_first = sorted(
            self.named().items(), key=lambda row: _shares(row[1])[:-1], reverse=True
        )
        return reports.Table(
            f"rounded to {jnp.dtype(self.dtype).name}",
            ("leaf", *numbers),
            [
                (
                    path,
                    f"{stats.size:.3g}",
                    *(reports.percent(x) if x else "-" for x in _shares(stats)),
                    _exponents(stats),
                )
                for path, stats in worst_first[: None if every else reports.LINES]
            ],
            numbers=numbers,
            caption="shares of all numbers of the leaf",
        )

    def plot(self) -> Any:
        """Return a matplotlib figure: each leaf's exponents over the range of half.

        Raises:
          ImportError: matplotlib is not installed (`pip install "jmp-lite[numerics]"`).
          ValueError: there is no histogram; or as `named`.
        """
        from jmp_lite._src.numerics.plot import plot_histograms

        drawn = {path: x.histogram for path, x in self.named().items()}
        return plot_histograms(drawn, self.dtype)

    def _to_fields(self):
        fields = trees.on_host(self.stats)._asdict()
        stats = {name: x for name, x in fields.items() if x is not None}
        dtype = dtypes.dtype_name(self.dtype)
        return {"dtype": dtype, "paths": self.paths, "stats": stats}

    @classmethod
    def _from_fields(cls, fields):
        arrays = {n: np.asarray(x, np.float32) for n, x in fields["stats"].items()}
        stats = ValueStats(**{"histogram": None, **arrays})
        if stats.histogram is not None:  # JSON does not say the shape of []
            shape = (*stats.size.shape, len(EXPONENTS))
            stats = stats._replace(histogram=stats.histogram.reshape(shape))
        return cls(stats, tuple(fields["paths"]), dtypes.parse_dtype(fields["dtype"]))


def tree_stats(tree: Any, dtype: DTypeLike, *, histogram: bool = False) -> TreeStats:
    """Count, leaf by leaf, what the numbers of a tree would be in a half dtype.

    Args:
      tree: any pytree. Leaves that are not floating or complex arrays (integers, keys,
        `float0`, Python scalars, objects) are left out.
      dtype: as for `value_stats`.
      histogram: as for `value_stats`.

    Returns:
      The statistics.

    Raises:
      ValueError: as `value_stats`.

    Examples:
      >>> grads = {"w": jnp.array([1e-9, 0.5]), "b": jnp.ones(3), "step": 3}
      >>> stats = jax.jit(lambda grads: tree_stats(grads, "f16"))(grads)
      >>> stats.paths, stats.stats.underflow.tolist()
      (('b', 'w'), [0.0, 1.0])
    """
    leaves = [
        (path, leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if trees.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    dtype = dtypes.parse_dtype(dtype)
    rows = [value_stats(leaf, dtype, histogram=histogram) for _, leaf in leaves]
    stacked = jax.tree.map(
        lambda one, *xs: jnp.stack(xs) if xs else jnp.zeros((0, *one.shape), one.dtype),
        empty(histogram=histogram),
        *rows,
    )
    names = [trees.key_path(path) for path, _ in leaves]
    times = collections.Counter(names)
    pairs = zip(names, leaves, strict=True)
    paths = (x if times[x] == 1 else jax.tree_util.keystr(p) for x, (p, _) in pairs)
    return TreeStats(stacked, tuple(paths), dtype)


# The fields whose share of all numbers is shown, the worst first, and their titles.
_SHARES = {
    "nonfinite": "non-\nfinite",
    "overflow": "over-\nflow",
    "underflow": "under-\nflow",
    "subnormal": "sub-\nnormal",
    "zero": "zero",
}


def _shares(stats: ValueStats) -> list[float]:
    size = max(float(stats.size), 1.0)
    return [float(getattr(stats, name)) / size for name in _SHARES]


def _exponents(stats: ValueStats) -> str:
    if stats.max_abs == 0:
        return "-"
    low, high = (np.frexp(x)[1] - 1 for x in (stats.min_abs, stats.max_abs))
    return f"{low}…{high}"
