"""Flax nnx: policies over the modules of a model, and a train state with rollback."""

from jmp_lite import extras

with extras.needed("flax"):
    from jmp_lite.nnx.modules import PolicyModule, with_policy
    from jmp_lite.nnx.train_state import TrainState

__all__ = ["PolicyModule", "TrainState", "with_policy"]
