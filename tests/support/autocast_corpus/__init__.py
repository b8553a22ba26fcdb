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

PROGRAMS = (
    *layers.PROGRAMS,
    *control_flow.PROGRAMS,
    *derivatives.PROGRAMS,
    *ops.PROGRAMS,
    *distribution.PROGRAMS,
    *effects.PROGRAMS,
)

__all__ = ["CHECKS", "PROGRAMS", "Program"]
