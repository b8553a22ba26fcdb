"""Memory: what a function keeps for its gradient, and what its program needs."""

import typing as _typing

from jmp_lite._src import extras as _extras
from jmp_lite._src.autocast.saving import save_products
from jmp_lite._src.memory.compare import Comparison, compare
from jmp_lite._src.memory.devices import DEVICES, Device, mesh
from jmp_lite._src.memory.saved import SavedArray, SavedReport, saved
from jmp_lite._src.memory.step import StepReport, of_step

__all__ = [
    "Comparison",
    "DEVICES",
    "Device",
    "SavedArray",
    "SavedReport",
    "StepReport",
    "compare",
    "mesh",
    "of_step",
    "save_products",
    "saved",
]


def __getattr__(name: str) -> _typing.Any:
    return _extras.lazy_attribute(__name__, name)
