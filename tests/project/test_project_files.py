"""Workflows and metadata agree with the Makefile, pyproject.toml and the package."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import jmp_lite

ROOT = Path(__file__).parents[2]
WORKFLOWS = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
ALL_WORKFLOWS = "".join(WORKFLOWS.values())


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


PYPROJECT = tomllib.loads(read("pyproject.toml"))
PROJECT = PYPROJECT["project"]


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


def test_an_action_has_one_version() -> None:
    used = set(re.findall(r"uses: (\S+)@(\S+)", ALL_WORKFLOWS))
    assert len(used) == len({name for name, _ in used})


def test_workflows_run_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M))
    run = set(re.findall(r"^\s*(?:- run: )?make ([a-z-]+)", ALL_WORKFLOWS, re.M))
    expected = "dist-test docs docs-test lint lowest programs pytest test-full types"
    assert set(expected.split()) <= run <= targets


def test_a_job_sets_up_the_python_that_make_is_told() -> None:
    for workflow in WORKFLOWS:
        for name, job in jobs(workflow).items():
            python = "${{ matrix.python }}"
            runs = " ".join(step.get("run", "") for step in job["steps"])
            if python in runs:
                (setup,) = (s for s in job["steps"] if "python@" in s.get("uses", ""))
                assert setup["with"]["python-version"] == python, name


def test_every_python_that_is_promised_is_tested() -> None:
    tested = set(re.findall(r'python(?:-version)?: "(3\.\d+)"', ALL_WORKFLOWS))
    named = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c}
    assert named == tested
    oldest = min(int(version.partition(".")[2]) for version in named)
    assert PROJECT["requires-python"] == f">=3.{oldest}"


def test_the_oldest_jax_is_the_same_everywhere() -> None:
    (oldest,) = re.findall(r"^JAX \?= jax==(\S+) jaxlib==\1$", read("Makefile"), re.M)
    minor = oldest.rpartition(".")[0]
    assert {"jax>=" + minor, "jaxlib>=" + minor} <= set(PROJECT["dependencies"])
    assert f"jax ≥ {minor}" in read("README.md")
    assert f"| jax, jaxlib | {oldest} |" in read("CONTRIBUTING.md")


def test_the_floors_that_are_promised_are_those_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["flax"], *extras["checkpoint"]]
    for name in ("optax", "flax", "orbax-checkpoint"):
        (floor,) = (w.partition(">=")[2] for w in wanted if w.startswith(f"{name}>="))
        promised = rf"^\| {name} \| {re.escape(floor)}\b"
        assert re.search(promised, read("CONTRIBUTING.md"), re.M)


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == jmp_lite.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]


def test_no_file_says_where_the_repository_is_but_what_a_release_fills_in() -> None:
    home = re.compile(r"github\.com/[^/\s]+/jmp_lite")
    patterns = "*.md *.toml *.cff *.yml packaging/* docs/**/*.md examples/*".split()
    files = [path for x in (*patterns, "jmp_lite/**/*.py") for path in ROOT.glob(x)]
    texts = [path.read_text("utf-8") for path in files if path.is_file()]
    assert len(texts) > 150 and not list(filter(home.search, texts))
