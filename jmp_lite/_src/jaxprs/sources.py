"""The source line of an equation of a jaxpr, in the user's code."""

import functools
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path

from jmp_lite._src import compat
from jmp_lite._src.jaxprs.core import Eqn

_HERE = str(Path(__file__).parents[2]) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep


def source_line(eqn: Eqn, around: str = "") -> str:
    """Return `file:line` of the user's code that made an equation, or `""`.

    Skips frames of JAX, of this package and of what is installed: other libraries, and
    Python's own. If the code that called this package is installed itself, its package
    is the user's. What is not the user's has the line of the call, loop or branch
    `around` it. JAX gives operations of custom derivative rules the line of the call.
    """
    frames = compat.user_frames(eqn.source_info.traceback)
    for frame in frames:
        if not _is_of_tools(frame.file_name) and not _package_of(frame.file_name):
            return f"{frame.file_name}:{frame.start_line}"
    program = _program()
    for frame in frames:
        if program and _package_of(frame.file_name) == program:
            return f"{frame.file_name}:{frame.start_line}"
    return around


def is_of_user(error: BaseException) -> bool:
    """Return whether an error went through code that is not JAX', Python's or ours."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(not _is_of_tools(frame.f_code.co_filename) for frame, _ in frames)


def _program() -> str:
    """Return the installed package of the code that called this one, or `""`."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and _is_of_tools(frame.f_code.co_filename):
        frame = frame.f_back
    return _package_of(frame.f_code.co_filename) if frame else ""


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
