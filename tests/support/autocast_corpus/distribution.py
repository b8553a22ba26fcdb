"""Programs over several devices: four of the eight that the tests have."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autocast_corpus.program import BATCHED, normal, program, weight

unbatched = functools.partial(
    program, checks_not=BATCHED, why="the batch would be a dimension of the mesh"
)


def mesh():
    """Return a mesh of four devices, `"x"`."""
    devices = jax.devices()[:4]
    return jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=devices)


@program(args=lambda: (weight(0, 8, 16), normal(1, 4, 8)))
def sharded_jit(w, x):
    rows, columns = NamedSharding(mesh(), P("x")), NamedSharding(mesh(), P(None, "x"))

    @functools.partial(jax.jit, in_shardings=(columns, rows), out_shardings=rows)
    def layer(w, x):
        hidden = lax.with_sharding_constraint(x @ w, rows)
        return jax.nn.gelu(hidden) @ w.T

    return layer(w, layer(w, x))


@program()
def shard_map_with_collectives(w, x):
    around = [(i, (i + 1) % 4) for i in range(4)]

    @functools.partial(
        jax.shard_map, mesh=mesh(), in_specs=(P("x"), P(None, "x")), out_specs=P("x")
    )
    def layer(w, x):
        x = lax.psum_scatter(x @ w, "x", scatter_dimension=0, tiled=True)
        w = lax.ppermute(w, "x", around)
        return jax.nn.relu(x @ lax.all_gather(w, "x", tiled=True))

    return jnp.tanh(layer(w, x))


@unbatched(args=lambda: (weight(0, 8, 8), normal(1, 2, 4, 8)))
def pmap(w, x):
    def layer(w, x):
        return lax.psum(jnp.tanh(x @ w), "x") @ w

    return jax.pmap(layer, axis_name="x", in_axes=(None, 0))(w, x)
