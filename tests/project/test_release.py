"""What is published, and that metadata, pages and workflows agree with it."""

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
EXTRAS = PROJECT["optional-dependencies"]
VERSION = jmp_lite.__version__
# What `make dist-test` installs alone. Others are platforms, or tools of this project.
PARTS = {"checkpoint", "completion", "flax", "numerics"}
OTHERS = {"dev", "docs", "examples", "gpu", "memory-gpu", "memory-tpu", "tpu"}


WORKFLOWS = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}


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
    used = "packaging/smoke.py .github/workflows/release.yml tests/data/peers.json"
    assert {*used.split(), "Makefile", "mkdocs.yml", "docs/hooks.py"} <= names
    top = {name.partition("/")[0] for name in names}
    assert top.isdisjoint({".git", ".venv", "build", "dist", "out", ".hypothesis"})


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
    assert f"Repository, {HOME}" in released.get_all("Project-URL")


def test_links_of_the_page_on_pypi_go_to_the_tag(released):
    page, readme = released.get_payload(), (ROOT / "README.md").read_text("utf-8")
    assert isinstance(page, str)
    assert _FENCE.findall(page) == _FENCE.findall(readme)  # code is as it was
    urls, relatives = (_LINK.findall(_FENCE.sub("", x)) for x in (page, readme))
    kinds = set()
    for url, relative in zip(urls, relatives, strict=True):
        if relative.startswith(("https://", "#")):
            assert url == relative
            continue
        kind = "raw" if relative.endswith((".png", ".svg")) else "blob"
        assert url == f"{HOME}/{kind}/v{VERSION}/{relative}"
        kinds.add(kind)
    assert kinds == {"raw", "blob"}


def test_the_version_and_what_it_needs_are_the_same_everywhere() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    unreleased, latest = re.findall(r"^## (.*)$", changelog, re.M)[:2]
    assert unreleased == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(VERSION)}\] - \d{{4}}-\d\d-\d\d", latest)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (citation["version"], citation["license"]) == (VERSION, PROJECT["license"])

    workflows = "".join(WORKFLOWS.values())
    tested = set(re.findall(r'python(?:-version)?: "(3\.\d+)"', workflows))
    named = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c}
    first = min(named, key=lambda version: int(version.partition(".")[2]))
    assert named == tested and PROJECT["requires-python"] == f">={first}"

    (oldest,) = re.findall(r"^JAX \?= jax==(\S+) jaxlib==\1$", MAKEFILE, re.M)
    minor = oldest.rpartition(".")[0]
    assert {f"jax>={minor}", f"jaxlib>={minor}"} <= set(PROJECT["dependencies"])
    assert f"jax ≥ {minor}" in (ROOT / "README.md").read_text("utf-8")
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert f"| jax, jaxlib | {oldest} |" in contributing
    wanted = [*PROJECT["dependencies"], *EXTRAS["flax"], *EXTRAS["checkpoint"]]
    for name, floor in (text.split(">=") for text in wanted):
        assert name in ("jax", "jaxlib") or f"| {name} | {floor}" in contributing


def test_the_recipe_for_conda_forge_agrees():
    recipe = yaml.safe_load((ROOT / "packaging" / "recipe.yaml").read_text("utf-8"))
    assert recipe["context"]["version"] == VERSION
    assert f">={recipe['context']['python_min']}" == PROJECT["requires-python"]
    assert recipe["about"]["license"] == PROJECT["license"]

    def conda(wanted: list[str]) -> set[str]:
        renamed = (text.replace("matplotlib>", "matplotlib-base>") for text in wanted)
        return {text.replace(">=", " >=") for text in renamed}

    needed = recipe["requirements"]
    assert set(needed["run"][1:]) == conda(PROJECT["dependencies"])
    assert set(needed["host"][2:]) == conda(PYPROJECT["build-system"]["requires"])
    optional = [text for part in PARTS for text in EXTRAS[part]]
    assert set(needed["run_constraints"]) == conda(optional)


SMOKE = runpy.run_path(str(ROOT / "packaging" / "smoke.py"))


def test_every_extra_is_tried_in_an_environment_of_its_own():
    assert set(EXTRAS) == PARTS | OTHERS
    assert set(SMOKE["PARTS"]) == PARTS | {"core"}
    (loop,) = re.findall(r"for part in ([a-z ]+);", MAKEFILE)
    assert set(loop.split()) == PARTS | {"core"}


@pytest.mark.standard_promotion  # of optax.adam, as for users
@pytest.mark.parametrize("part", SMOKE["PARTS"])
def test_the_trial_of_a_wheel_runs(part):
    SMOKE["PARTS"][part]()


# Workflows.


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_a_workflow_pins_its_actions_and_may_only_read(workflow: str) -> None:
    text = WORKFLOWS[workflow]
    pinned = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert all(map(pinned.fullmatch, re.findall(r"uses: (.*)", text)))
    parsed: Any = yaml.safe_load(text)
    assert parsed["permissions"] == {"contents": "read"}
    allowed = {"publish": {"id-token": "write"}, "pages": {"contents": "write"}}
    for name, job in parsed["jobs"].items():
        assert job.get("permissions", {}) == allowed.get(name, {})
        assert "timeout-minutes" in job
