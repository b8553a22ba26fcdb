"""What mkdocstrings does to docstrings: `::` and an indented block become code.

Docstrings are reStructuredText for Python, and Markdown for the pages: there, code is
indented by four spaces.
"""

import re
from typing import Any

import griffe

_BLOCK = re.compile(r"::\n\n((?:(?P<indent> +)\S.*\n?)(?:(?P=indent).*\n?|[ ]*\n)*)")


class LiteralBlocks(griffe.Extension):
    """Rewrites the docstring of every object that is documented."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite a docstring; griffe calls it."""
        del kwargs
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    """Return a docstring with its literal blocks as Markdown has them."""

    def code(match: re.Match[str]) -> str:
        # Two spaces more: blocks are indented by two.
        return ":\n\n" + re.sub(r"^(?=.)", "  ", match[1], flags=re.M)

    return _BLOCK.sub(code, docstring)
