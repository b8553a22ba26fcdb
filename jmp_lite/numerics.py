"""Numerics: what half precision does to the numbers, per operation and per layer."""

import typing as _typing

from jmp_lite._src import extras as _extras
from jmp_lite._src.numerics.advice import Advice, advise
from jmp_lite._src.numerics.dry_run import dry_run
from jmp_lite._src.numerics.lint import Finding, LintReport, lint
from jmp_lite._src.numerics.nonfinite import (
    NonFinite,
    NonFiniteTracker,
    first_nonfinite,
    track_nonfinite,
)
from jmp_lite._src.numerics.report import DryRunReport, OpStats
from jmp_lite._src.numerics.stats import ValueStats, value_stats
from jmp_lite._src.numerics.tree_stats import TreeStats, tree_stats

__all__ = [
    "Advice",
    "DryRunReport",
    "Finding",
    "LintReport",
    "NonFinite",
    "NonFiniteTracker",
    "OpStats",
    "TreeStats",
    "ValueStats",
    "advise",
    "dry_run",
    "first_nonfinite",
    "lint",
    "track_nonfinite",
    "tree_stats",
    "value_stats",
]


def __getattr__(name: str) -> _typing.Any:
    return _extras.lazy_attribute(__name__, name)
