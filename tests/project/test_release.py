"""What is published, and that workflows, metadata and the Makefile agree with it."""

import datetime
import email
import email.message
import os
import re
import runpy
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling import build

import jmp_lite

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
VERSION = jmp_lite.__version__
# What `make dist-test` installs alone. Others are platforms, or tools of this project.
PARTS = {"checkpoint", "completion", "flax", "numerics"}
OTHERS = {"dev", "docs", "examples", "gpu", "memory-gpu", "memory-tpu", "tpu"}


def build_in(folder: Path, out: Path) -> zipfile.ZipFile:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # as build frontends do
        return zipfile.ZipFile(out / build.build_wheel(str(out)))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build_in(ROOT, tmp_path_factory.mktemp("wheel"))


INFO = f"jmp_lite-{VERSION}.dist-info"
HOME = "https://github.com/someone/jmp_lite"


def metadata_of(wheel: zipfile.ZipFile) -> email.message.Message:
    return email.message_from_string(wheel.read(f"{INFO}/METADATA").decode())


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> email.message.Message:
    """Return the metadata of a wheel with the address that a release fills in."""
    folder = tmp_path_factory.mktemp("released")
    for name in ("LICENSE", "README.md", "jmp_lite/__init__.py", "packaging/home.toml"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    workflow = (ROOT / ".github/workflows/release.yml").read_text("utf-8")
    fill_in = set(re.findall(r"run: (sed .*pyproject.toml)$", workflow, re.M))
    assert workflow.count("packaging/home.toml") == 2 and len(fill_in) == 1
    shutil.copy(ROOT / "pyproject.toml", folder)
    environment = {**os.environ, "URL": HOME}
    subprocess.run(fill_in.pop(), shell=True, check=True, cwd=folder, env=environment)
    return metadata_of(build_in(folder, folder))


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = wheel.namelist()
    information = {name for name in names if name.startswith(f"{INFO}/")}
    held = "METADATA RECORD WHEEL entry_points.txt licenses/LICENSE".split()
    assert information == {f"{INFO}/{name}" for name in held}
    package = ROOT / "jmp_lite"
    sources = {str(p.relative_to(ROOT)) for p in package.rglob("*.py")}
    data = {"jmp_lite/py.typed", "jmp_lite/_src/memory/devices.toml"}
    assert set(names) - information == sources | data
    commands = wheel.read(f"{INFO}/entry_points.txt").decode()
    assert commands == "[console_scripts]\njmp-lite = jmp_lite.__main__:main\n"


def test_the_sdist_holds_what_its_tests_need(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / build.build_sdist(str(tmp_path))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    tests = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("*.py")}
    assert tests <= names
    wanted = {
        *("LICENSE", "Makefile", "README.md", "pyproject.toml", "mkdocs.yml"),
        *("benchmarks/programs.py", "docs/hooks.py", "examples/digits.py"),
        *("packaging/smoke.py", ".github/workflows/release.yml", ".ci/run"),
        "tests/data/peers.json",
    }
    assert wanted <= names
    top = {name.partition("/")[0] for name in names}
    assert top.isdisjoint({".git", "build", "dist", "out", ".hypothesis"})
    assert not [name for name in top if name.startswith(".venv")]


_LINK = re.compile(r"\]\(([^)\s]*)\)")
_FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def test_upload_tools_take_the_metadata_whose_address_a_release_fills_in(
    wheel, released
):
    metadata = metadata_of(wheel)
    for each in (metadata, released):
        assert each["Metadata-Version"] == "2.4"  # of all of them
        assert each["License-Expression"] == PROJECT["license"]
    assert "Project-URL" not in metadata  # which would lead nowhere
    (repository,) = (x for x in released.get_all("Project-URL") if "Repository" in x)
    assert repository == f"Repository, {HOME}"


def test_links_of_the_page_on_pypi_go_to_the_tag(released):
    page, readme = released.get_payload(), (ROOT / "README.md").read_text("utf-8")
    assert isinstance(page, str)
    assert _FENCE.findall(page) == _FENCE.findall(readme)  # code is as it was
    urls, relatives = (_LINK.findall(_FENCE.sub("", x)) for x in (page, readme))
    links = zip(urls, relatives, strict=True)
    changed = {relative: url for url, relative in links if url != relative}
    for relative, url in changed.items():
        kind = "raw" if relative.endswith((".png", ".svg")) else "blob"
        assert url == f"{HOME}/{kind}/v{VERSION}/{relative}"
        assert (ROOT / relative.partition("#")[0]).exists()
    left = [x for x in urls if not x.startswith(("https://", "#")) and x not in changed]
    assert left == []
    assert any("/raw/" in url for url in changed.values())
    assert any("/blob/" in url for url in changed.values())


def test_the_changelog_dates_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, second = re.findall(r"^## (.*)$", text, re.M)[:2]
    assert first == "[Unreleased]"
    name, _, date = second.partition(" - ")
    assert name == f"[{VERSION}]"
    assert datetime.date.fromisoformat(date).isoformat() == date


def test_the_recipe_for_conda_forge_agrees():
    recipe = yaml.safe_load((ROOT / "packaging" / "recipe.yaml").read_text("utf-8"))
    assert recipe["context"]["version"] == VERSION
    assert f">={recipe['context']['python_min']}" == PROJECT["requires-python"]
    assert recipe["package"]["name"] == PROJECT["name"]
    assert recipe["about"]["summary"] == PROJECT["description"]
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["license_file"] in PROJECT["license-files"]
    commands = [f"{name} = {call}" for name, call in PROJECT["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == commands

    def conda(wanted: list[str]) -> set[str]:
        renamed = (text.replace("matplotlib>", "matplotlib-base>") for text in wanted)
        return {text.replace(">=", " >=") for text in renamed}

    needed = recipe["requirements"]
    assert needed["run"][0] == "python >=${{ python_min }}"
    assert set(needed["run"][1:]) == conda(PROJECT["dependencies"])
    assert needed["host"][:2] == ["python ${{ python_min }}.*", "pip"]
    assert set(needed["host"][2:]) == conda(PYPROJECT["build-system"]["requires"])
    extras = PROJECT["optional-dependencies"]
    optional = [text for part in PARTS for text in extras[part]]
    assert set(needed["run_constraints"]) == conda(optional)


SMOKE = runpy.run_path(str(ROOT / "packaging" / "smoke.py"))


def test_every_extra_is_tried_in_an_environment_of_its_own():
    assert set(PROJECT["optional-dependencies"]) == PARTS | OTHERS
    assert set(SMOKE["PARTS"]) == PARTS | {"core"}
    (loop,) = re.findall(r"for part in ([a-z ]+);", MAKEFILE)
    assert set(loop.split()) == PARTS | {"core"}


@pytest.mark.standard_promotion  # of optax.adam, as for users
@pytest.mark.parametrize("part", SMOKE["PARTS"])
def test_the_trial_of_a_wheel_runs(part):
    SMOKE["PARTS"][part]()


# Workflows and metadata.

WORKFLOWS = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
ALL_WORKFLOWS = "".join(WORKFLOWS.values())


def jobs(workflow: str) -> dict[str, Any]:
    return yaml.safe_load(WORKFLOWS[workflow])["jobs"]


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_a_workflow_pins_its_actions_and_may_only_read(workflow: str) -> None:
    text = WORKFLOWS[workflow]
    used = re.findall(r"uses: (.*)", text)
    assert used
    pinned = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert [action for action in used if not pinned.fullmatch(action)] == []
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    granted = {name: job.get("permissions", {}) for name, job in jobs(workflow).items()}
    allowed = {"publish": {"id-token": "write"}, "pages": {"contents": "write"}}
    assert granted == {name: allowed.get(name, {}) for name in granted}
    assert all("timeout-minutes" in job for job in jobs(workflow).values())
    # An action has one version everywhere.
    everywhere = set(re.findall(r"uses: (\S+)@(\S+)", ALL_WORKFLOWS))
    assert len(everywhere) == len({name for name, _ in everywhere})


def test_workflows_run_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    run = set(re.findall(r"^\s*(?:- run: )?make ([a-z-]+)", ALL_WORKFLOWS, re.M))
    expected = "dist-test docs docs-test lint lowest programs pytest test-full types"
    assert set(expected.split()) <= run <= targets


def test_versions_and_floors_are_the_same_everywhere() -> None:
    tested = set(re.findall(r'python(?:-version)?: "(3\.\d+)"', ALL_WORKFLOWS))
    named = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c}
    oldest = min(int(version.partition(".")[2]) for version in named)
    assert named == tested and PROJECT["requires-python"] == f">=3.{oldest}"

    (oldest,) = re.findall(r"^JAX \?= jax==(\S+) jaxlib==\1$", MAKEFILE, re.M)
    minor = oldest.rpartition(".")[0]
    assert {"jax>=" + minor, "jaxlib>=" + minor} <= set(PROJECT["dependencies"])
    assert f"jax ≥ {minor}" in (ROOT / "README.md").read_text("utf-8")
    assert f"| jax, jaxlib | {oldest} |" in CONTRIBUTING
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["flax"], *extras["checkpoint"]]
    for name in ("optax", "flax", "orbax-checkpoint"):
        (floor,) = (w.partition(">=")[2] for w in wanted if w.startswith(f"{name}>="))
        promised = rf"^\| {name} \| {re.escape(floor)}\b"
        assert re.search(promised, CONTRIBUTING, re.M)

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == VERSION
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]


def test_no_file_says_where_the_repository_is_but_what_a_release_fills_in() -> None:
    home = re.compile(r"github\.com/[^/\s]+/jmp_lite")
    patterns = "*.md *.toml *.cff *.yml packaging/* docs/**/*.md examples/*".split()
    files = [path for x in (*patterns, "jmp_lite/**/*.py") for path in ROOT.glob(x)]
    texts = [path.read_text("utf-8") for path in files if path.is_file()]
    assert len(texts) > 150 and not list(filter(home.search, texts))


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == VERSION
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
