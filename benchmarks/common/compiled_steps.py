"""The train steps that benchmarks compile: casts and layouts of models."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jmp_lite
from benchmarks.common.models import MODELS, OTHERS, SIZES, Sizes
from jmp_lite.memory import save_products

PLAIN, BY_HAND, POLICY = "as written", "by hand", "policy"
GRAD_AUTOCAST, AUTOCAST_GRAD = "grad(autocast(f))", "autocast(grad(f))"
ADVISED = "grad(autocast(f)), advised"
CASTS = BY_HAND, POLICY, GRAD_AUTOCAST, ADVISED  # those whose steps are timed
# In `jax.checkpoint` with the policy `jmp_lite.memory.save_products`.
SAVE_PRODUCTS = "grad(autocast(f)), save_products"
# The policy has `reduce=float32`.
REDUCE_FLOAT32 = "grad(autocast(f)), r=f32"

_ALL = MODELS | OTHERS


@dataclasses.dataclass(frozen=True)
class Step:
    """An Adam step."""

    model: str  # a key of `MODELS` or of `OTHERS`
    dtype: str = "float32"  # or "fp8": bfloat16, with large products in fp8
    cast: str = PLAIN
    scaled: bool = False  # by `scale_aware`
    # Or "data parallel" on four, or "FSDP": each holds a quarter of each parameter.
    layout: str = "one device"

    def __str__(self) -> str:
        layout = "" if self.layout == "one device" else f", {self.layout}"
        scaled = ", scale_aware" if self.scaled else ""
        cast = "" if self.cast == PLAIN else f" {self.cast}"
        return f"{self.model}{layout}: {self.dtype}{cast}{scaled}"

    @property
    def base(self) -> "Step":
        """What the figures of this one are held against."""
        if self.scaled:
            return dataclasses.replace(self, scaled=False)
        if self.dtype == "float32":
            return self
        if self.dtype == "fp8":
            return dataclasses.replace(self, dtype="bfloat16")
        if self.cast == REDUCE_FLOAT32:
            return dataclasses.replace(self, cast=GRAD_AUTOCAST)
        return dataclasses.replace(self, cast=BY_HAND)


def filled(shapes: Any, integers: int = 10) -> Any:
    """Return random numbers of these shapes, and ones where they have one axis."""
    rng = np.random.default_rng(0)

    def fill(x):
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, integers, x.shape), x.dtype)
        if x.ndim < 2:
            return jnp.ones(x.shape, x.dtype)
        return jnp.asarray(rng.normal(size=x.shape) / x.shape[-2] ** 0.5, x.dtype)

    return jax.tree.map(fill, shapes)


@functools.cache
def advised_policy(model: str, dtype: str) -> jmp_lite.PolicyMap | jmp_lite.Policy:
    """Return what `advise` says of a model that is small, on random numbers."""
    sizes = SIZES["small"][model]
    params, kept, *batch = filled(MODELS[model].shapes(sizes))
    loss = MODELS[model].make_loss("float32", sizes)
    advise = jmp_lite.numerics.advise(loss, f"mixed_{dtype}", has_aux=True)
    return advise(params, *_held(kept), *batch).policy


def _held(kept: Any) -> tuple[Any, ...]:
    """Return what a loss takes between its parameters and its batch."""
    return (kept,) if jax.tree.leaves(kept) else ()


def _value_and_grad(step: Step, sizes: Sizes, is_tpu: bool) -> Callable[..., Any]:
    """Return `fun(opt_state, params, *rest) -> ((loss, kept), grads)`."""
    # What autocast does by default where JAX' backend is that device.
    autocast = functools.partial(jmp_lite.autocast, recompute=not is_tpu)
    make_loss = _ALL[step.model].make_loss
    policy: Any = f"mixed_{step.dtype}"
    if step.cast in (PLAIN, BY_HAND):
        loss = make_loss(step.dtype, sizes)
    elif step.cast != POLICY:
        loss = make_loss("float32", sizes)
    elif step.model == "cnn":
        loss = make_loss("float32", sizes, policy)
    else:
        half_loss = make_loss(step.dtype, sizes)
        cast = jmp_lite.get_policy(policy).cast_to_compute

        def loss(params, *rest):
            return half_loss(cast(params), *rest)

    if step.cast == SAVE_PRODUCTS:
        loss = jax.checkpoint(loss, policy=save_products)
    if step.cast == REDUCE_FLOAT32:
        policy = f"p=float32,c={step.dtype},o=float32,r=float32"
    if step.cast == ADVISED:
        policy = advised_policy(step.model, step.dtype)
    if step.cast in (GRAD_AUTOCAST, SAVE_PRODUCTS, REDUCE_FLOAT32, ADVISED):
        loss = autocast(loss, policy)

    def fun(opt_state, *args):
        of_loss = functools.partial(jax.value_and_grad, loss)
        if step.scaled:
            scaled = jmp_lite.scaled_value_and_grad
            of_loss = functools.partial(scaled, loss, loss_scale=opt_state)
        return of_loss(has_aux=True)(*args)

    return autocast(fun, policy) if step.cast == AUTOCAST_GRAD else fun


def fp8_by_rule(step: Step, sizes: Sizes) -> int:
    """Return how many products of a step have fp8 operands, by autocast's rule.

    They are counted in the gradient as it is written, not in what autocast makes of the
    function: each product that the rule puts in fp8, and the gradient of each of its
    operands that has one.
    """
    if step.dtype != "fp8":
        return 0
    model = _ALL[step.model]
    params, kept, *batch = model.shapes(sizes)
    grad = jax.grad(model.make_loss("float32", sizes), has_aux=True)
    report = jmp_lite.explain(grad, "mixed_fp8")(params, *_held(kept), *batch)
    return sum(row.times for row in report.rows if row.is_fp8)


def optimizer(step: Step) -> optax.GradientTransformationExtraArgs:
    tx = optax.with_extra_args_support(optax.adam(1e-3))
    return jmp_lite.scale_aware(tx) if step.scaled else tx


def build(step: Step, sizes: Sizes, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a train step to compile, and the shapes it takes.

    Args:
      step: which.
      sizes: those of its model.
      mesh: what it is for, with an axis "data".

    Returns:
      `fun(params, opt_state, kept, *batch) -> params, opt_state, kept, loss`, jitted;
      shapes with shardings; the first three of them are donated.
    """
    is_tpu = mesh.devices.flat[0].platform == "tpu"
    value_and_grad = _value_and_grad(step, sizes, is_tpu)
    tx = optimizer(step)

    def fun(params, opt_state, kept, *batch):
        (loss, kept), grads = value_and_grad(opt_state, params, *_held(kept), *batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, kept, loss

    params, kept, *batch = _ALL[step.model].shapes(sizes)
    opt_state = jax.eval_shape(tx.init, params)

    def place(x, is_split):
        spec = PartitionSpec("data") if is_split else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def is_split(x):
        return step.layout == "FSDP" and x.ndim > 0 and x.shape[0] % mesh.size == 0

    held = jax.tree.map(lambda x: place(x, is_split(x)), (params, opt_state, kept))
    batch = jax.tree.map(lambda x: place(x, mesh.size > 1), batch)
    out = (*jax.tree.map(lambda x: x.sharding, held), None)
    jitted = jax.jit(fun, donate_argnums=(0, 1, 2), out_shardings=out)
    return jitted, (*held, *batch)


def steps(models: str, dtypes: str, *casts: str, **how: Any) -> list[Step]:
    """Return the steps of models, in each of the dtypes and by each of the casts."""
    chosen = itertools.product(models.split(", "), dtypes.split(), casts)
    return [Step(*x, **how) for x in chosen]


HALVES = "bfloat16 float16"
_FAMILIES = "unet, vit, llama, moe"
_SMALL_FAMILIES = "conformer, convnext, unet3d, dit, gnn, pinn"
STEPS: list[Step] = [
    Step("transformer"),
    *steps("transformer", HALVES, BY_HAND, POLICY, GRAD_AUTOCAST, AUTOCAST_GRAD),
    Step("transformer", "fp8", GRAD_AUTOCAST),
    Step("transformer", "float16", ADVISED),
    *steps("transformer", "bfloat16", REDUCE_FLOAT32, SAVE_PRODUCTS),
    Step("transformer", "float16", BY_HAND, scaled=True),
    Step("mlp"),
    *steps("mlp", HALVES, BY_HAND, GRAD_AUTOCAST),
    Step("mlp", "fp8", GRAD_AUTOCAST),
    Step("mlp", "float16", BY_HAND, scaled=True),
    Step("cnn"),
    *steps("cnn", HALVES, BY_HAND, POLICY, GRAD_AUTOCAST),
    Step("cnn", "float16", ADVISED),
    Step("cnn", "float16", BY_HAND, scaled=True),
    *steps(f"{_FAMILIES}, lstm", "bfloat16", BY_HAND, GRAD_AUTOCAST, REDUCE_FLOAT32),
    *steps(_FAMILIES, "float16", BY_HAND, GRAD_AUTOCAST, ADVISED),
    *steps("llama in a scan", HALVES, BY_HAND, GRAD_AUTOCAST),
    *steps("llama, moe", "fp8", GRAD_AUTOCAST),
    *(
        dataclasses.replace(step, layout=layout)
        for layout in ("data parallel", "FSDP")
        for step in (
            Step("transformer"),
            *steps("transformer", "bfloat16", BY_HAND, GRAD_AUTOCAST, REDUCE_FLOAT32),
            Step("transformer", "float16", BY_HAND),
            Step("transformer", "float16", BY_HAND, scaled=True),
        )
    ),
    Step("transformer", "fp8", GRAD_AUTOCAST, layout="FSDP"),
    *steps("llama", "bfloat16", BY_HAND, GRAD_AUTOCAST, REDUCE_FLOAT32, layout="FSDP"),
    # In float16 they have the same plan.
    *steps(_SMALL_FAMILIES, "bfloat16", BY_HAND, GRAD_AUTOCAST),
]
# Compiled once, of other families.
STEPS_OF_OTHERS = steps(", ".join(OTHERS), HALVES, BY_HAND, GRAD_AUTOCAST)
