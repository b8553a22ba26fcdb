"""Memory: what a function keeps for its gradient, and what its program needs."""

from jmp_lite._src.autocast.segments import save_products
from jmp_lite._src.memory.compare import Compared, Comparison, compare
from jmp_lite._src.memory.devices import DEVICES, Device, mesh
from jmp_lite._src.memory.saved import SavedArray, SavedReport, saved
from jmp_lite._src.memory.step import LiveRow, StepReport, of_step

__all__ = [
    "Compared",
    "Comparison",
    "DEVICES",
    "Device",
    "LiveRow",
    "SavedArray",
    "SavedReport",
    "StepReport",
    "compare",
    "mesh",
    "of_step",
    "save_products",
    "saved",
]
