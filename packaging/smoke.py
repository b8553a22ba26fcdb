"""Try an installed jmp_lite: `python packaging/smoke.py PART`.

PART is `core`, which needs no extra, or an extra that `jmp_lite` itself uses. `make
dist-test` runs each in an environment that holds the wheel and nothing else.
"""

import importlib.metadata
import sys
import tempfile

import jax
import jax.numpy as jnp
import optax

import jmp_lite as jmp
from jmp_lite.__main__ import main

X, Y = jnp.ones((8, 4), jnp.float32), jnp.full((8, 1), 3.0, jnp.float32)


def params_of(value):
    return {"w1": jnp.full((4, 16), value), "w2": jnp.full((16, 1), value)}


def plain_loss(params, x, y):
    return jnp.mean((jax.nn.relu(x @ params["w1"]) @ params["w2"] - y) ** 2)


def try_core():
    params = params_of(0.1)
    # The first scale is above the range of float16: the first steps are skipped.
    tx = jmp.scale_aware(optax.adam(0.02), jmp.DynamicLossScale(2.0**24))
    loss_fn = jmp.autocast(plain_loss, "mixed_float16")

    @jax.jit
    def step(params, opt_state):
        fun = jmp.scaled_value_and_grad(loss_fn, loss_scale=opt_state)
        loss, grads = fun(params, X, Y)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for _ in range(30):
        params, opt_state, loss = step(params, opt_state)
        losses.append(float(loss))
    assert losses[-1] < 0.1 * losses[0], losses
    assert 1 < float(jmp.get_loss_scale(opt_state).loss_scale) < 2.0**24
    assert main(["doctor", "--json", "--seconds", "0.1"]) == 0


def try_checkpoint():
    from jmp_lite import checkpoint

    state = {"w": X.astype(jnp.float16), "scale": jmp.DynamicLossScale(2.0**10)}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, state, step=1)
        restored = checkpoint.restore(folder, state).state
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), state, restored))


def try_completion():
    assert main(["completion", "bash"]) == 0


def try_flax():
    import flax.linen as nn
    from flax import nnx

    from jmp_lite import linen
    from jmp_lite import nnx as jmp_nnx

    model = linen.with_policy(nn.Dense(4), "mixed_bfloat16")
    variables = model.init(jax.random.key(0), X)
    state = linen.TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=optax.adam(0.1)
    )
    assert state.apply_fn({"params": state.params}, X).dtype == jnp.float32
    layer = jmp_nnx.with_policy(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), "mixed_float16")
    assert layer(X).shape == Y.shape


def try_numerics():
    import rich

    dry_run = jmp.numerics.dry_run(plain_loss, "mixed_float16")
    report = dry_run(params_of(1e3), X, Y)
    rich.print(report.table())
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        report.plot().savefig(file.name)
        assert file.read(4) == b"\x89PNG"


PARTS = {
    "core": try_core,
    "checkpoint": try_checkpoint,
    "completion": try_completion,
    "flax": try_flax,
    "numerics": try_numerics,
}

if __name__ == "__main__":
    assert "site-packages" in jmp.__file__, jmp.__file__
    PARTS[sys.argv[1]]()
    found = [f"{d.name} {d.version}" for d in importlib.metadata.distributions()]
    print(f"{sys.argv[1]} works with", ", ".join(sorted(found)), file=sys.stderr)
