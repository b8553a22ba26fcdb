"""Trees: casts of all floating arrays of a pytree."""

from jmp_lite._src.trees import cast_floating, cast_like

__all__ = ["cast_floating", "cast_like"]
