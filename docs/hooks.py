"""What MkDocs changes in the pages: links out of docs/ go to the repository."""

import re
import tomllib
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
_OUTSIDE = re.compile(r"\]\(\s*\.\./([^)\s]+)\s*\)")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Return a page with its links to `../...` as URLs, which MkDocs calls this for."""
    del kwargs
    text = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    repository = tomllib.loads(text)["project"]["urls"]["Repository"]

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match[1].endswith((".png", ".svg")) else "blob"
        return f"]({repository}/{kind}/main/{match[1]})"

    return _OUTSIDE.sub(link, markdown)
