"""Numerics: what half precision does to the numbers, per operation and per layer."""

from jmp_lite.numerics.advice import Advice, advise
from jmp_lite.numerics.dry_run import dry_run
from jmp_lite.numerics.lint import Finding, LintReport, lint
from jmp_lite.numerics.report import Report, Row
from jmp_lite.numerics.stats import EXPONENTS, ValueStats, empty, merge, value_stats
from jmp_lite.numerics.tree_stats import TreeStats, tree_stats
from jmp_lite.numerics.tripwire import (
    NonFinite,
    Tripwire,
    first_nonfinite,
    with_tripwire,
)

__all__ = [
    "Advice",
    "EXPONENTS",
    "Finding",
    "LintReport",
    "NonFinite",
    "Report",
    "Row",
    "TreeStats",
    "Tripwire",
    "ValueStats",
    "advise",
    "dry_run",
    "empty",
    "first_nonfinite",
    "lint",
    "merge",
    "tree_stats",
    "value_stats",
    "with_tripwire",
]
