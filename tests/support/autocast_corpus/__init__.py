"""Programs that autocast must hold up on: data for the tests."""

from autocast_corpus import (
    control_flow,
    derivatives,
    distribution,
    effects,
    layers,
    ops,
)
from autocast_corpus.program import CHECKS, Program

_MODULES = layers, control_flow, derivatives, ops, distribution, effects
PROGRAMS = tuple(
    x for m in _MODULES for x in vars(m).values() if isinstance(x, Program)
)

__all__ = ["CHECKS", "PROGRAMS", "Program"]
