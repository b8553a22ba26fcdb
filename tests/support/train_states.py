"""The train states of linen and nnx behind one interface, for tests of both.

Each model has a norm and a dropout between two layers, under a float16 policy. The
state of linen has fields of its own.
"""

import functools
from typing import Any

import bitwise
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct

import jmp_lite
from jmp_lite import DynamicLossScale, linen, scale_aware, scaled_value_and_grad
from jmp_lite import nnx as jmp_nnx

SCALE = DynamicLossScale(2.0**10)
OVERFLOWING = 1e6  # beyond float16 itself, and in every sum over it

# `bad`, `value` and `size` of `apply`: a factor of one gradient, the loss, and what is
# added to the batch statistics.
FINITE = (1.0, 0.5, 1.0)
NOT_FINITE = {
    "gradients": (jnp.inf, 0.5, 1.0),
    "loss": (1.0, jnp.nan, 1.0),
    "batch statistics": (1.0, 0.5, jnp.inf),
    "batch statistics, without a loss": (1.0, None, jnp.inf),
    "all": (jnp.nan, jnp.inf, jnp.nan),
}


def batch(n: int, size: float = 1.0) -> jax.Array:
    """Return a batch of inputs; from about 1e5 on, the first layer overflows."""
    x = np.random.default_rng(n).normal(size=(8, 3))
    return jnp.asarray(size * x, jnp.float32)


def gradients(params: Any, bad: Any = 1.0) -> Any:
    """Return gradients in half, one element of them multiplied by `bad`."""
    grads = jax.tree.map(
        lambda p: jnp.cos(p.astype(jnp.float32)).astype(jnp.float16), params
    )
    leaves, structure = jax.tree.flatten(grads)
    leaves[-1] = leaves[-1].at[(0,) * leaves[-1].ndim].multiply(bad)
    return jax.tree.unflatten(structure, leaves)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, *, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(4)(x))
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
        return nn.Dense(2)(x)


class Bigger(linen.TrainState):
    """With fields of its own."""

    metrics: Any = None
    note: str = struct.field(pytree_node=False, default="none")


class Linen:
    """linen's train state."""

    model = linen.with_policy(LinenNet(), "mixed_float16")
    variables: Any = jax.jit(
        lambda: Linen.model.init(jax.random.key(0), jnp.ones((8, 3)), train=False)
    )

    @classmethod
    def create(cls, tx: Any = None, **fields: Any) -> Any:
        """Return a state at step 0, with arrays that it may donate."""
        tx = scale_aware(optax.adam(0.1), SCALE) if tx is None else tx
        metrics = {"seen": jnp.int32(0), "loss": jnp.float32(0)}
        more = {"rng": jax.random.key(1), "metrics": metrics, "note": "mine"}
        fields = cls.variables() | more | fields
        return Bigger.create(apply_fn=cls.model.apply, tx=tx, **fields)

    @classmethod
    def create_half(cls, tx: Any) -> Any:
        """Return a state whose parameters are stored in half."""
        params = cls.variables()["params"]
        return cls.create(tx, params=jmp_lite.trees.cast_floating(params, jnp.bfloat16))

    @staticmethod
    def other_state(state: Any) -> dict[str, Any]:
        """Return what `apply_gradients` takes beside gradients and loss."""
        return {"batch_stats": state.batch_stats}

    @staticmethod
    def train_step(state: Any, x: Any) -> Any:
        """Return the state after a step, and the loss."""
        rng, dropout_rng = jax.random.split(state.rng)

        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            rngs = {"dropout": dropout_rng}
            out, new = state.apply_fn(variables, x, rngs=rngs, mutable=["batch_stats"])
            return jnp.mean((out.astype(jnp.float32) - 1) ** 2), new["batch_stats"]

        value_and_grad = scaled_value_and_grad(
            loss_fn, loss_scale=state.opt_state, has_aux=True
        )
        (loss, batch_stats), grads = value_and_grad(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=batch_stats, rng=rng)
        return state, loss

    @staticmethod
    @functools.partial(jax.jit, compiler_options=bitwise.UNOPTIMISED)
    def apply(state, bad, value, size):
        """Return the state after a step on `gradients` and all that comes with it."""
        fields: Any = {
            "batch_stats": jax.tree.map(lambda x: x + size, state.batch_stats),
            "rng": jax.random.split(state.rng)[0],
            "metrics": {"seen": state.metrics["seen"] + 1, "loss": jnp.float32(0.5)},
        }
        grads = gradients(state.params, bad)
        return state.apply_gradients(grads=grads, value=value, **fields)

    @classmethod
    def evaluate(cls, state: Any) -> Any:
        """Return the output of the model with its running statistics."""
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        return cls.model.apply(variables, batch(0), train=False)

    @staticmethod
    def kernel(params: Any) -> Any:
        """Return the kernel of the first layer."""
        return params["Dense_0"]["kernel"]


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)
        self.mask = nnx.Variable(jnp.array([0.0, -jnp.inf]))

    def __call__(self, x):
        x = self.dropout(nnx.relu(self.norm(self.first(x))))
        return self.last(x)


class Nnx:
    """nnx' train state, with the methods of the other."""

    @staticmethod
    def make_model(policy: str = "mixed_float16") -> Any:
        """Return the model under a policy."""
        return jmp_nnx.with_policy(NnxNet(nnx.Rngs(0)), policy)

    @classmethod
    def create(cls, tx: Any = None, model: Any = None, **options: Any) -> Any:
        tx = scale_aware(optax.adam(0.1), SCALE) if tx is None else tx
        model = cls.make_model() if model is None else model
        return jmp_nnx.TrainState.create(model, tx, **options)

    @classmethod
    def create_half(cls, tx: Any) -> Any:
        return cls.create(tx, cls.make_model("p=bf16,c=bf16,o=f32"))

    @staticmethod
    def other_state(state: Any) -> dict[str, Any]:
        return {"other_state": state.other_state}

    @staticmethod
    def train_step(state: Any, x: Any) -> Any:
        def loss_fn(params):
            model = state.model(params)
            return jnp.mean((model(x) - 1) ** 2), state.other_state_of(model)

        value_and_grad = scaled_value_and_grad(
            loss_fn, loss_scale=state.opt_state, has_aux=True
        )
        (loss, other_state), grads = value_and_grad(state.params)
        return state.apply_gradients(grads=grads, other_state=other_state), loss

    @staticmethod
    @functools.partial(jax.jit, compiler_options=bitwise.UNOPTIMISED)
    def apply(state, bad, value, size):
        model = state.model()
        model(batch(0))
        stats = nnx.state(model, nnx.BatchStat)
        nnx.update(model, jax.tree.map(lambda x: x + size, stats))
        return state.apply_gradients(
            grads=gradients(state.params, bad),
            value=value,
            other_state=state.other_state_of(model),
        )

    @staticmethod
    def evaluate(state: Any) -> Any:
        model = state.model()
        model.eval()
        return model(batch(0))

    @staticmethod
    def kernel(params: Any) -> Any:
        return params["model"]["first"]["kernel"][...]


def run_with_an_overflow(state: Any, step: Any) -> Any:
    """Return the state before a batch that overflows, after it, and five steps on."""
    for n in range(2):
        state, _ = step(state, batch(n))
    before = state
    after, _ = step(state, batch(2, OVERFLOWING))
    state, loss = after, None
    for n in range(3, 8):
        state, loss = step(state, batch(n))
    return before, after, state, loss


def schedule():
    return optax.piecewise_constant_schedule(0.1, {1: 0.5, 2: 0.5})
