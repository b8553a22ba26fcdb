"""The one room that knows which versions of other libraries there are.

Everything that JAX does not promise to keep (`jax.extend`, `jax._src`) and every
question about a version or about an optional library that may or may not be loaded
is asked here, so that an upgrade is a change to one file.
"""

import dataclasses
import sys
from typing import Any


def register_with_flax_serialization(cls: type) -> None:
    """Teach `flax.serialization` a pytree dataclass, if flax is loaded.

    Flax keeps its own registry of types, by exact type, and passes unknown ones
    through as if they were a leaf, which its msgpack writer then refuses. Fields that
    are static (`metadata={"static": True}`) are the program's, not the checkpoint's.

    Args:
      cls: a dataclass; its non-static fields are what is saved.
    """
    serialization = sys.modules.get("flax.serialization")
    # Half-way through `import flax` the module is there but not yet filled.
    register = getattr(serialization, "register_serialization_state", None)
    if register is None or cls in _REGISTERED_WITH_FLAX:
        return
    names = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static")]

    def to_state_dict(instance: Any) -> dict[str, Any]:
        return {n: serialization.to_state_dict(getattr(instance, n)) for n in names}

    def from_state_dict(instance: Any, state: dict[str, Any]) -> Any:
        if set(state) != set(names):
            raise ValueError(
                f"The saved {cls.__name__} has the fields {sorted(state)}, expected "
                f"{sorted(names)}."
            )
        return dataclasses.replace(
            instance,
            **{
                n: serialization.from_state_dict(getattr(instance, n), state[n], name=n)
                for n in names
            },
        )

    register(cls, to_state_dict, from_state_dict, override=True)
    _REGISTERED_WITH_FLAX.add(cls)


# A record of what flax's registry was told, not a setting: it only grows.
_REGISTERED_WITH_FLAX: set[type] = set()
