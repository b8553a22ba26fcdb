"""Flax linen: policies for the modules of a model, and a train state."""

import functools
import typing

from jmp_lite._src import extras

with extras.needed("flax"):
    from jmp_lite._src.flax.linen.modules import PolicyModule, with_policy
    from jmp_lite._src.flax.linen.train_state import TrainState

__all__ = ["PolicyModule", "TrainState", "with_policy"]

if not typing.TYPE_CHECKING:  # to a type checker, any name would be right
    __getattr__ = functools.partial(extras.lazy_attribute, __name__)
