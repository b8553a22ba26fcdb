"""Autocast: a function rewritten so that what is safe runs in half precision."""

from jmp_lite.autocast.explain import Report, explain
from jmp_lite.autocast.ops import OpRules, default_rules
from jmp_lite.autocast.transform import autocast, full_precision, sums_in_float32

__all__ = [
    "OpRules",
    "Report",
    "autocast",
    "default_rules",
    "explain",
    "full_precision",
    "sums_in_float32",
]
