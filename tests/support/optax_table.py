"""The transformations of optax: links of a chain, and what wraps another optimiser.

By name, that of `optax` or of `optax.contrib`: a function that makes one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

RATE = 0.1
MASK = {"w": True, "b": False}


def sgd() -> Any:
    return optax.sgd(RATE)


def loss(params: Any) -> Any:
    return sum(jnp.sum(jnp.cosh(x)) for x in jax.tree.leaves(params))


def loss_arguments(params: Any) -> dict[str, Any]:
    """Return what line searches are given beside gradients."""
    value, grad = jax.value_and_grad(loss)(params)
    return {"value": value, "grad": grad, "value_fn": loss}


def named(names: str, *args: Any) -> dict[str, Callable[[], Any]]:
    """Return functions that make transformations of these arguments."""

    def make(name):
        *module, function = name.split(".")
        return lambda: getattr(contrib if module else optax, function)(*args)

    return {name: make(name) for name in names.split()}


def _every_other(step: Any, **extra: Any) -> Any:
    del extra
    return step % 2 == 0


LINKS: dict[str, Callable[[], Any]] = {
    **named(
        "centralize keep_params_nonnegative normalize_by_update_norm scale_by_adam "
        "scale_by_lion scale_by_polyak scale_by_rms scale_by_sign "
        "scale_by_trust_ratio zero_nans"
    ),
    **named("adaptive_grad_clip add_decayed_weights", 0.1),
    **named("clip clip_by_block_rms clip_by_global_norm scale", 0.5),
    **named("ema trace", 0.9),
    **named("apply_every scale_by_backtracking_linesearch scale_by_lbfgs", 2),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "contrib.reduce_on_plateau": lambda: contrib.reduce_on_plateau(patience=1),
    "freeze": lambda: optax.freeze(MASK),
    "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(
        min_dim_size_to_factor=2
    ),
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(
        0.5, flip_sign=False
    ),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda n: 1 / (1 + n)),
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
}
# Their update raises without `value`, `grad` and `value_fn`.
NEED_LOSS = (
    "contrib.reduce_on_plateau",
    "scale_by_backtracking_linesearch",
    "scale_by_polyak",
)
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, _every_other),
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, _every_other
    ),
    "contrib.mechanize": contrib.mechanize,
    "contrib.sam": lambda tx: contrib.sam(
        tx, optax.chain(contrib.normalize(), optax.sgd(0.05))
    ),
    "contrib.schedule_free": lambda tx: contrib.schedule_free(tx, RATE),
    "flatten": optax.flatten,
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(tx, optax.scale(rate))
    )(lambda n: 1 / (1 + n)),
    "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
    "masked": lambda tx: optax.masked(tx, MASK),
    "partition": lambda tx: optax.partition({True: tx, False: sgd()}, MASK),
}
