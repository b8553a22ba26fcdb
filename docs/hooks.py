"""What MkDocs changes: addresses of the repository, and links out of docs/ to it."""

import re
import tomllib
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent


def on_config(config: Any) -> None:
    """Set where the pages are edited; MkDocs calls it."""
    config["repo_url"] = repository()
    config["repo_name"] = repository().rpartition("/")[2]
    config["edit_uri"] = "edit/main/docs/"


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Return a page with its links to files outside docs/ as URLs; MkDocs calls it."""
    del kwargs
    # In docs/recipes/, such a link is `../../...`, and `../...` is another page.
    up = r"\.\./" * (page.file.src_uri.count("/") + 1)
    outside = re.compile(rf"\]\(\s*{up}([^)\s]+)\s*\)")
    return outside.sub(lambda match: f"]({address(match[1])})", markdown)


def repository() -> str:
    """Return the address of the repository."""
    text = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"]["urls"]["Repository"]


def address(path: str) -> str:
    """Return the address of a file of the repository; a notebook opens in Colab."""
    if path.endswith(".ipynb"):
        where = repository().removeprefix("https://github.com/")
        return f"https://colab.research.google.com/github/{where}/blob/main/{path}"
    kind = "raw" if path.endswith((".png", ".svg")) else "blob"
    return f"{repository()}/{kind}/main/{path}"
