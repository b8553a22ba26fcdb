"""Single operations: their classes under `autocast`, and a product in fp8."""

from jmp_lite._src.autocast.options import OpRules
from jmp_lite._src.fp8 import fp8_dot_general

__all__ = ["OpRules", "fp8_dot_general"]
