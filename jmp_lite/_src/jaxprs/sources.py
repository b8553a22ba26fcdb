"""The source line of an equation of a jaxpr, in the user's code."""

import functools
import os
import re
import sys
import sysconfig
import traceback
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from jmp_lite._src import compat
from jmp_lite._src.jaxprs.core import Eqn

_HERE = str(Path(__file__).parents[2]) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep


def source_line(eqn: Eqn, around: str = "") -> str:
    """Return `file:line` of the user's code that made an equation, or `""`.

    Skips frames of JAX, of this package and of what is installed: other libraries, and
    Python's own. If the code that called this package is installed itself, its package
    is the user's. What is not the user's has the line of the call, loop or branch
    `around` it.
    """
    frames = compat.user_frames(eqn.source_info.traceback)
    files = [frame.file_name for frame in frames]
    of_users = [i for i, file in enumerate(files) if not _is_in_library(file)]
    if not of_users and (program := _program()):
        of_users = [i for i, file in enumerate(files) if _package_of(file) == program]
    if not of_users:
        return around
    return f"{files[of_users[0]]}:{frames[of_users[0]].start_line}"


def is_of_user(error: BaseException) -> bool:
    """Return whether an error went through code that is not JAX', Python's or ours."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(not _is_of_tools(frame.f_code.co_filename) for frame, _ in frames)


def lines_of_rules() -> AbstractContextManager[None]:
    """Trace operations of custom derivative rules with the lines of the rules.

    JAX runs a rule under the traceback of the call, so every operation of it would have
    the line of the call; it does if JAX stores tracebacks in an unknown way.

    Limits: JAX caches the traces of jitted functions with their lines. A function that
    was differentiated before has the lines that it had then.
    """
    return compat.replace_source_info(lambda source: _LinesOfRules(source, _depth()))


class _LinesOfRules:
    """Replaces JAX' current `SourceInfo`.

    Operations get the traceback of `source`, if it has one; `depth` is that of the call
    stack when it got it.
    """

    __slots__ = ("depth", "source")
    traceback = None  # JAX then makes one for each operation

    def __init__(self, source: Any, depth: int):
        self.source, self.depth = source, depth

    @property
    def name_stack(self) -> Any:
        return self.source.name_stack

    def replace(self, *, traceback: Any = None, name_stack: Any = None) -> Any:
        """Return the source of one operation, or of all that follow."""
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        if compat.is_source_info_code(caller.f_code):
            if self.source.traceback is not None and not self._is_of_a_user(traceback):
                traceback = None
            return self.source.replace(traceback=traceback, name_stack=name_stack)
        depth = self.depth if traceback is None else _depth()
        source = self.source.replace(traceback=traceback, name_stack=name_stack)
        return _LinesOfRules(source, depth)

    def _is_of_a_user(self, traceback: Any) -> bool:
        """Return whether user code was called after `depth` calls."""
        codes, _ = traceback.raw_frames()
        return any(
            not _is_in_library(code.co_filename)
            for code in codes[: max(_depth() - self.depth, 0)]
        )


def _depth() -> int:
    frame, count = sys._getframe(1), 0  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


def _program() -> str:
    """Return the installed package of the code that called this one, or `""`."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and _is_of_tools(frame.f_code.co_filename):
        frame = frame.f_back
    return _package_of(frame.f_code.co_filename) if frame else ""


def _is_in_library(path: str) -> bool:
    return _is_of_tools(path) or bool(_package_of(path))


@functools.cache
def _is_of_tools(path: str) -> bool:
    """Return whether a file is of this package, of Python or of JAX."""
    if path.startswith((_HERE, "<frozen ")) or not compat.is_user_file(path):
        return True
    return path.startswith(_PYTHON) and not _package_of(path)


@functools.cache
def _package_of(path: str) -> str:
    """Return the path of the installed package or module that a file is of, or `""`.

    Examples:
      >>> _package_of("/venv/lib/python3.13/site-packages/einops/einops.py")
      '/venv/lib/python3.13/site-packages/einops'
      >>> _package_of("/home/me/train.py")
      ''
    """
    found = re.match(r".*[\\/](site|dist)-packages[\\/][^\\/:]+", path)
    return found[0] if found else ""
