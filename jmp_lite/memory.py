"""Memory: what a function keeps for its gradient, and what its program needs."""

from jmp_lite._src.autocast.recompute import save_products
from jmp_lite._src.memory.saved import SavedArray, SavedReport, saved

__all__ = ["SavedArray", "SavedReport", "save_products", "saved"]
