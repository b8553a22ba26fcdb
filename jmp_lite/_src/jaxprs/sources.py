"""Where an equation of a jaxpr comes from: the line of the user's code."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from jmp_lite._src import compat

_JAX = str(Path(jax.__file__).parent)


def source_line(eqn: Any) -> str:
    """Return `file:line` of the user's code that made an equation, or `""`.

    Frames of JAX are left out by JAX, those of libraries and of this package here.
    """
    for frame in compat.user_frames(eqn.source_info.traceback):
        if not _is_in_library(frame.file_name):
            return f"{frame.file_name}:{frame.start_line}"
    return ""


def traceback_of(eqn: Any) -> Any:
    """Return the traceback of an equation, which can be compared and hashed, or None.

    What differentiation makes of an equation has that of the equation.
    """
    return eqn.source_info.traceback


def lines_of_rules() -> AbstractContextManager[None]:
    """Trace so that what a user's derivative rule computes has the lines of the rule.

    JAX runs the rule of a custom derivative under the traceback of the call, and so
    every operation of the rule has the line of the call. Within this context, and this
    thread, lines of users' code that was called since are preferred. If JAX keeps
    tracebacks in another way than is known here, lines are those that JAX gives.

    Limits: JAX keeps what it traces of a jitted function, its lines as well. One that
    was differentiated before has the lines that it had then.
    """
    return compat.source_replaced(lambda source: _LinesOfRules(source, _depth()))


class _LinesOfRules:
    """Stands for JAX' `SourceInfo` of operations that are traced now.

    Attributes:
      source: the `SourceInfo`; operations have its traceback, if it has one.
      depth: how many calls were under way when it got that.
    """

    __slots__ = ("depth", "source")
    traceback = None  # so that JAX makes one for each operation

    def __init__(self, source: Any, depth: int):
        self.source, self.depth = source, depth

    @property
    def name_stack(self) -> Any:
        return self.source.name_stack

    def replace(self, *, traceback: Any = None, name_stack: Any = None) -> Any:
        """Return the source of one operation, or of all from now on."""
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        if compat.takes_the_source(caller.f_code):
            if self.source.traceback is not None and not self._is_of_a_user(traceback):
                traceback = None
            return self.source.replace(traceback=traceback, name_stack=name_stack)
        depth = self.depth if traceback is None else _depth()
        source = self.source.replace(traceback=traceback, name_stack=name_stack)
        return _LinesOfRules(source, depth)

    def _is_of_a_user(self, traceback: Any) -> bool:
        """Return whether users' code was called since a traceback was given."""
        codes, _ = traceback.raw_frames()
        return any(
            compat.is_user_file(code.co_filename)
            and not _is_in_library(code.co_filename)
            for code in codes[: max(_depth() - self.depth, 0)]
        )


def _depth() -> int:
    """Return how many calls are under way."""
    frame, count = sys._getframe(1), 0  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


_LIBRARY_PATHS = (
    *(f"/site-packages/{name}/" for name in ("flax", "equinox", "optax", "chex")),
    str(Path(__file__).parents[2]).replace("\\", "/") + "/",
)


def is_library_call(eqn: Any) -> bool:
    """Return whether an equation calls a function that JAX or a library has jitted."""
    info = getattr(compat.open_jaxpr(eqn.params.get("jaxpr")), "debug_info", None)
    path = getattr(info, "func_filename", None) or ""
    return path.startswith(_JAX) or _is_in_library(path)


def _is_in_library(path: str) -> bool:
    return any(part in path.replace("\\", "/") for part in _LIBRARY_PATHS)
