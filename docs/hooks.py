"""What MkDocs changes in the pages: links out of docs/ go to the repository."""

import re
import tomllib
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Return a page with its links to files outside docs/ as URLs; MkDocs calls it."""
    del kwargs
    # In docs/recipes/, such a link is `../../...`, and `../...` is another page.
    up = r"\.\./" * (page.file.src_uri.count("/") + 1)
    outside = re.compile(rf"\]\(\s*{up}([^)\s]+)\s*\)")
    text = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    repository = tomllib.loads(text)["project"]["urls"]["Repository"]

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match[1].endswith((".png", ".svg")) else "blob"
        return f"]({repository}/{kind}/main/{match[1]})"

    return outside.sub(link, markdown)
