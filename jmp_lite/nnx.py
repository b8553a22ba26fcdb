"""Flax nnx: policies for the modules of a model, and a train state."""

from jmp_lite._src import extras as _extras

with _extras.needed("flax"):
    from jmp_lite._src.flax.nnx.modules import PolicyModule, with_policy
    from jmp_lite._src.flax.nnx.train_state import TrainState

__all__ = ["PolicyModule", "TrainState", "with_policy"]
