"""Ways to write dtypes, and devices that are not here, for the tests of both."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

FLOATS = {
    "float16": jnp.float16,
    "bfloat16": jnp.bfloat16,
    "float32": jnp.float32,
    "float64": jnp.float64,
}
SHORT_NAMES = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "full",
    "float64": "f64",
}


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What the library asks of a `jax.Device`, for hardware that is not here."""

    platform: str
    compute_capability: str | None = None
    device_kind: str = "a device"


@st.composite
def spellings(draw):
    """Draw a dtype's NumPy name, and one way of writing that dtype."""
    name = draw(st.sampled_from(sorted(FLOATS)))
    scalar_type = FLOATS[name]
    ways = [
        name,
        f" {name} ",
        scalar_type,
        np.dtype(name),
        np.dtype(name).newbyteorder(),
    ]
    if name in SHORT_NAMES:
        ways.append(SHORT_NAMES[name])
    if hasattr(np, name):
        ways.append(getattr(np, name))
    return name, draw(st.sampled_from(ways))
