"""How many bytes a training step holds, from shapes and dtypes alone."""

from collections.abc import Callable
from typing import Any

import jax


def tree_bytes(tree: Any) -> int:
    """Return the bytes of the arrays (or `ShapeDtypeStruct`s) of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def activation_bytes(loss_fn: Callable[..., Any], params: Any, batch: Any) -> int:
    """Return the bytes that the forward pass saves for the backward pass.

    These are the residuals of `jax.vjp`, before XLA fuses some of them away. Those that
    do not grow with the batch are (casts of) weights, not activations, and are left
    out: the difference between a batch and two batches is what one batch adds.

    Args:
      loss_fn: `loss_fn(params, batch)`, a scalar.
      params: any pytree of arrays.
      batch: any pytree of arrays, the batch dimension first.

    Returns:
      Bytes. Nothing is computed: shapes are enough.
    """

    def residual_bytes(copies: int) -> int:
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (x.shape[0] * copies, *x.shape[1:]), x.dtype
            ),
            batch,
        )
        # What `vjp` returns is a pytree: its leaves are what it remembers.
        backward = jax.eval_shape(
            lambda p, b: jax.vjp(lambda p: loss_fn(p, b), p)[1], params, shapes
        )
        return tree_bytes(backward)

    return residual_bytes(2) - residual_bytes(1)
