"""What MkDocs adds: files outside of docs/, the changelog and the benchmarks."""

import re
import tomllib
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent

# Pages of the site whose text is a file outside of docs/. Of that of the benchmarks,
# which would be a page of 21,000 px, each has some sections; "" is what begins it.
_CHANGELOG, _BENCHMARKS = "CHANGELOG.md", "benchmarks/README.md"
_SECTIONS = {
    "benchmarks.md": ("", "train_step", "memory", "Run them yourself"),
    "benchmarks/programs.md": ("programs",),
    "benchmarks/families.md": ("Families of models",),
    "benchmarks/losses.md": (
        *("convergence", "Runs of the examples", "fp8_accuracy", "storage_accuracy"),
    ),
    "benchmarks/overhead.md": ("step_overhead", "autocast_trace"),
}
_PICTURES = (".png", ".svg")
_COPIED = "outside"  # where files from outside docs/ are on the site
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")


def on_config(config: Any, **kwargs: Any) -> Any:
    """Set where pages are edited, once a release has filled in the repository."""
    del kwargs
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    if home := project.get("urls", {}).get("Repository"):
        config |= {"repo_url": home, "repo_name": home.rpartition("/")[2]}
        config["edit_uri"] = "edit/main/docs/"
    return config


def on_files(files: Any, *, config: Any, **kwargs: Any) -> Any:
    """Take what pages show or link outside of docs/ into the site: it needs no host."""
    del kwargs
    from mkdocs.structure.files import File  # the tests need no MkDocs

    for page in files.documentation_pages():
        for path in _outside(page.src_uri.count("/")).findall(page.content_string):
            path = path.partition("#")[0]
            copy, source = _copy_of(path), str(_ROOT / path)
            if path not in (_CHANGELOG, _BENCHMARKS) and copy not in files.src_uris:
                files.append(File.generated(config, copy, abs_src_path=source))
    return files


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Return a page with its links out of docs/ to the copies; MkDocs calls it.

    What is included stands below the title.
    """
    del kwargs
    uri = page.file.src_uri
    up = "../" * uri.count("/")
    if uri == "changelog.md" or uri in _SECTIONS:
        title, _, below = markdown.partition("\n")
        text = _included(uri)
        text = _LINK.sub(lambda match: _on_site(match, up), text)
        markdown = f"{title}\n{text}{below}"

    def link(match: re.Match[str]) -> str:
        path, anchor, place = match[1].partition("#")
        if path in (_CHANGELOG, _BENCHMARKS):
            return f"]({up}{_page_of(path, place)}{anchor}{place})"
        return f"]({up}{_copy_of(path)})"

    return _outside(up.count("/")).sub(link, markdown)


def _included(page: str) -> str:
    """Return the text that a page has of a file outside of docs/, without its title."""
    if page == "changelog.md":
        return (_ROOT / _CHANGELOG).read_text("utf-8").partition("\n")[2]
    text = (_ROOT / _BENCHMARKS).read_text("utf-8").partition("\n")[2]
    begin, *rest = re.split(r"^(?=## )", text, flags=re.M)
    sections = {x.partition("\n")[0].removeprefix("## "): x for x in rest}
    return "".join(({"": begin} | sections)[name] for name in _SECTIONS[page])


def _page_of(source: str, place: str) -> str:
    """Return the page of the site that has a heading of a file outside of docs/."""
    if source == _CHANGELOG:
        return "changelog.md"
    for page in _SECTIONS:
        headings = re.findall(r"^##+ (.+)$", _included(page), re.M)
        if place in (re.sub(r"[^\w-]+", "-", x.lower()) for x in headings):
            return page
    return "benchmarks.md"


def on_page_content(html: str, **kwargs: Any) -> str:
    """Return a page whose figures open large, for a phone."""
    del kwargs
    figure = re.compile(r'(?<=<p>)<img [^>]*src="([^"]+)"[^>]*>(?=</p>)')
    return figure.sub(r'<a href="\1">\g<0></a>', html)


def on_post_page(output: str, **kwargs: Any) -> str:
    """Return a page whose tables fit: in names there are places to break a line.

    A cell has the title of its column, for a phone. The search does not see them.
    """
    del kwargs
    return re.sub(r"<table>.*?</table>", _fitting, output, flags=re.S)


# Where a name may break: in it, and behind brackets and commas, as in
# `tx.<wbr>update(<wbr>grads, opt_<wbr>state)`.
_BREAK = re.compile(r"(?<=[_(,=/])(?=[^\s)])|(?<=\.)(?=[A-Za-z_])")


def _fitting(table: re.Match[str]) -> str:
    text = re.sub(r"(?<=<code>)[^<]*", lambda c: _BREAK.sub("<wbr>", c[0]), table[0])
    titles = [
        re.sub("<[^>]+>", "", title).replace('"', "&quot;")
        for title in re.findall(r"<th\b[^>]*>(.*?)</th>", text, re.S)
    ]
    if len(titles) < 3:
        return text

    def with_titles(row: re.Match[str]) -> str:
        shown = iter(titles)
        return re.sub("<td", lambda _: f'<td data-title="{next(shown)}"', row[0])

    return re.sub(r"<tr>.*?</tr>", with_titles, text, flags=re.S)


_DARK = re.compile(
    r"@media \(prefers-color-scheme: dark\)\s*\{(?:[^{}]*\{[^{}]*\})*\s*\}"
)


def on_post_build(*, config: Any, **kwargs: Any) -> None:
    """Leave the dark colours of figures to the style sheet, which knows the page's.

    A figure in itself knows those of the device alone, and would be inverted twice.
    """
    del kwargs
    for path in Path(config["site_dir"]).glob("**/*.svg"):
        path.write_text(_DARK.sub("", path.read_text("utf-8")), "utf-8")


def _on_site(match: re.Match[str], up: str) -> str:
    """Return a link of an included file as one of the site, or its text alone."""
    text, link = match.groups()
    if link.startswith("#"):
        return f"{text}({up}{_page_of(_BENCHMARKS, link[1:])}{link})"
    if re.match("https?:", link):
        return match[0]
    path = link.removeprefix("../docs/")
    is_there = (_ROOT / "docs" / path.partition("#")[0]).exists()
    return f"{text}({up}{path})" if is_there else text.strip("[]")


def _outside(depth: int) -> re.Pattern[str]:
    """Return what finds links out of docs/, on a page that many folders down."""
    # In docs/recipes/, such a link is `../../...`, and `../...` is another page.
    up = r"\.\./" * (depth + 1)
    return re.compile(rf"\]\(\s*{up}([^)\s]+)\s*\)")


def _copy_of(path: str) -> str:
    """Return where a file outside of docs/ is on the site.

    A page of Markdown would be a page of the site, with links of its own.
    """
    return f"{_COPIED}/{path}" + ".txt" * (not path.endswith(_PICTURES))
