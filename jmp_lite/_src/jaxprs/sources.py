"""The source line of an equation of a jaxpr, in the user's code."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from jmp_lite._src import compat

_JAX = str(Path(jax.__file__).parent)


def source_line(eqn: Any) -> str:
    """Return `file:line` of the user's code that made an equation, or `""`.

    Skips frames of JAX, of other libraries and of this package.
    """
    for frame in compat.user_frames(eqn.source_info.traceback):
        if not _is_in_library(frame.file_name):
            return f"{frame.file_name}:{frame.start_line}"
    return ""


def traceback_of(eqn: Any) -> Any:
    """Return the traceback of an equation, which is hashable, or None.

    Equations that differentiation derives from it have the same traceback.
    """
    return eqn.source_info.traceback


def lines_of_rules() -> AbstractContextManager[None]:
    """Trace operations of custom derivative rules with the lines of the rules.

    JAX runs the rule of a custom derivative under the traceback of the call, so every
    operation of the rule has the line of the call. Within this context, in this thread,
    it has the line of the user's code in the rule instead. If JAX stores tracebacks in
    an unknown way, lines stay as JAX gives them.

    Limits: JAX caches the traces of jitted functions with their lines. A function that
    was differentiated before has the lines that it had then.
    """
    return compat.replace_source_info(lambda source: _LinesOfRules(source, _depth()))


class _LinesOfRules:
    """Replaces JAX' current `SourceInfo`.

    Attributes:
      source: the `SourceInfo`; operations get its traceback, if it has one.
      depth: the depth of the call stack when it got that.
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
            compat.is_user_file(code.co_filename)
            and not _is_in_library(code.co_filename)
            for code in codes[: max(_depth() - self.depth, 0)]
        )


def _depth() -> int:
    """Return the depth of the call stack."""
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
