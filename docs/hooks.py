"""What MkDocs adds: files outside of docs/, the changelog and the benchmarks, a check.

The build fails if a public name is not in the reference, is there twice, or has no
docstring with an example. The sources are parsed, not imported.
"""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent

# Pages of the site whose text is a file outside of docs/. Of that of the benchmarks,
# which would be a page of 21,000 px, each has some sections; "" is what begins it.
_CHANGELOG, _BENCHMARKS = "CHANGELOG.md", "benchmarks/README.md"
_INCLUDED = {
    "changelog.md": (_CHANGELOG, None),
    "benchmarks.md": (_BENCHMARKS, ("", "train_step", "memory", "Run them yourself")),
    "benchmarks/programs.md": (_BENCHMARKS, ("programs",)),
    "benchmarks/families.md": (_BENCHMARKS, ("Families of models",)),
    "benchmarks/losses.md": (
        _BENCHMARKS,
        (
            "convergence",
            "Runs of the examples",
            "fp8_accuracy",
            "storage_accuracy",
        ),
    ),
    "benchmarks/overhead.md": (_BENCHMARKS, ("step_overhead", "autocast_trace")),
}
_PICTURES = (".png", ".svg")
_COPIED = "outside"  # where files from outside docs/ are on the site
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
_DIRECTIVE = re.compile(r"^::: (\S+)$", re.M)
_NAMES = re.compile(r"`(\w+)")


def on_config(config: Any, **kwargs: Any) -> Any:
    """Set where pages are edited; fail if the reference lacks something."""
    del kwargs
    if home := repository():
        config |= {"repo_url": home, "repo_name": home.rpartition("/")[2]}
        config["edit_uri"] = "edit/main/docs/"
    if faults := list(reference_faults()):
        from mkdocs.exceptions import PluginError  # the tests need no MkDocs

        raise PluginError("\n".join(faults))
    return config


def on_files(files: Any, *, config: Any, **kwargs: Any) -> Any:
    """Take what pages show or link outside of docs/ into the site: it needs no host."""
    del kwargs
    from mkdocs.structure.files import File

    for page in files.documentation_pages():
        for path in _outside(page.src_uri.count("/")).findall(page.content_string):
            path = path.partition("#")[0]
            if path in (_CHANGELOG, _BENCHMARKS):
                continue
            if _copy_of(path) not in files.src_uris:
                file = File.generated(
                    config, _copy_of(path), abs_src_path=str(_ROOT / path)
                )
                files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Return a page with its links out of docs/ to the copies; MkDocs calls it.

    What is included stands below the title.
    """
    del kwargs
    up = "../" * page.file.src_uri.count("/")
    if page.file.src_uri in _INCLUDED:
        title, _, below = markdown.partition("\n")
        text = _included(page.file.src_uri)
        text = _LINK.sub(lambda match: _on_site(match, up), text)
        markdown = f"{title}\n{text}{below}"

    def link(match: re.Match[str]) -> str:
        path, anchor, place = match[1].partition("#")
        if path in (_CHANGELOG, _BENCHMARKS):
            return f"]({up}{_page_of(path, place)}{anchor}{place})"
        return f"]({up}{_copy_of(path)})"

    return _outside(up.count("/")).sub(link, markdown)


def _included(page: str) -> str:
    """Return the text that a page has of a file outside of docs/."""
    source, wanted = _INCLUDED[page]
    text = (_ROOT / source).read_text("utf-8").partition("\n")[2]
    if wanted is None:
        return text
    sections = dict(_sections(text))
    return "".join(sections[name] for name in wanted)


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield the sections of a text by their headings, first what is above them all."""
    begin, *rest = re.split(r"^(?=## )", text, flags=re.M)
    yield "", begin
    for section in rest:
        yield section.partition("\n")[0].removeprefix("## "), section


def _page_of(source: str, place: str) -> str:
    """Return the page of the site that has a heading of a file outside of docs/."""
    pages = [page for page, (path, _) in _INCLUDED.items() if path == source]
    for page in pages:
        headings = re.findall(r"^##+ (.+)$", _included(page), re.M)
        if place in (re.sub(r"[^\w-]+", "-", x.lower()) for x in headings):
            return page
    return pages[0]


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


def _fitting(table: re.Match[str]) -> str:
    text = re.sub(r"(<code>)([^<]*)", lambda code: code[1] + _breaks(code[2]), table[0])
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


def _breaks(code: str) -> str:
    """Return code whose lines may break in names, and behind brackets and commas.

    Examples:
      >>> _breaks("tx.update(grads, opt_state)")
      'tx.<wbr>update(<wbr>grads, opt_<wbr>state)'
    """
    return re.sub(r"(?<=[_(,=/])(?=[^\s)])|(?<=\.)(?=[A-Za-z_])", "<wbr>", code)


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


def repository() -> str | None:
    """Return the address of the repository, None until a release has filled it in."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return project.get("urls", {}).get("Repository")


def _copy_of(path: str) -> str:
    """Return where a file outside of docs/ is on the site.

    A page of Markdown would be a page of the site, with links of its own.
    """
    return f"{_COPIED}/{path}" + ".txt" * (not path.endswith(_PICTURES))


def reference_faults(root: Path = _ROOT) -> Iterator[str]:
    """Yield what is wrong with the public names and the pages that document them."""
    pages = [root / "docs" / "reference.md", *(root / "docs").glob("reference/*.md")]
    documented = Counter(
        name for page in pages for name in _DIRECTIVE.findall(page.read_text("utf-8"))
    )
    public = dict(_public_names(root))
    with_example = {
        name.rpartition(".")[2] for name, doc in public.items() if ">>> " in doc
    }
    for name, doc in public.items():
        if documented[name] != 1:
            yield (
                f"{name} is {documented[name]} times in docs/reference, expected once: "
                f"`::: {name}`"
            )
        if not doc:
            yield f"{name} has no docstring"
        # The example of a function also shows the class that it returns.
        is_class = name.rpartition(".")[2][0].isupper()
        elsewhere = is_class and {*_NAMES.findall(doc)} & with_example
        if doc and ">>> " not in doc and not elsewhere:
            yield f"{name} has no example, and names no function that has one"
        # What stands before a colon would be shown as the type of the result.
        if re.search(r"^Returns:\n[^\n]*:( |$)", doc, re.M):
            yield f"{name} has a colon in the first line of its Returns"
    for name in documented:
        if name not in public:
            yield f"{name} is in docs/reference, but is not public"


def _public_names(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the full name of everything in an `__all__`, and its docstring."""
    namespaces = sorted((root / "jmp_lite").glob("[!_]*.py"))
    for path in (root / "jmp_lite" / "__init__.py", *namespaces):
        tree = _parse(path)
        names = next(
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "__all__"
        )
        origins = {
            alias.asname or alias.name: node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        for name in names:
            module = "jmp_lite" if path.stem == "__init__" else f"jmp_lite.{path.stem}"
            source = root / (origins[name].replace(".", "/") + ".py")
            yield f"{module}.{name}", _docstring(_parse(source), name)


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _docstring(tree: ast.Module, name: str) -> str:
    """Return the docstring of a name at the top of a module; "" if there is none."""
    # Backwards: the overloads of a function stand above it.
    for node, after in reversed([*zip(tree.body, [*tree.body[1:], None], strict=True)]):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == name:
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                return str(after.value.value)
    return ""
