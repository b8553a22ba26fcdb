"""Workflows and metadata agree with the Makefile, pyproject.toml and the package."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import jmp_lite

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))["project"]


def oldest_jax() -> str:
    (version,) = re.findall(r"^JAX \?= jax==(\S+) jaxlib==\1$", read("Makefile"), re.M)
    return version


def jobs(workflow: Path) -> dict[str, Any]:
    return yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_pins_its_actions_and_may_only_read(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")
    used = re.findall(r"uses: (.*)", text)
    assert used
    pinned = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert [action for action in used if not pinned.fullmatch(action)] == []
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    granted = {name: job.get("permissions", {}) for name, job in jobs(workflow).items()}
    allowed = {"publish": {"id-token": "write"}}
    assert granted == {name: allowed.get(name, {}) for name in granted}
    assert all("timeout-minutes" in job for job in jobs(workflow).values())


def test_an_action_has_one_version() -> None:
    texts = [path.read_text(encoding="utf-8") for path in WORKFLOWS]
    used = set(re.findall(r"uses: (\S+)@(\S+)", "".join(texts)))
    assert len(used) == len({name for name, _ in used})


def test_workflows_run_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M))
    texts = [path.read_text(encoding="utf-8") for path in WORKFLOWS]
    run = set(re.findall(r"^\s*(?:- run: )?make ([a-z-]+)", "".join(texts), re.M))
    assert {"docs", "lint", "programs", "pytest", "test-full", "types"} <= run
    assert run <= targets


def test_a_job_sets_up_the_python_that_make_is_told() -> None:
    for workflow in WORKFLOWS:
        for name, job in jobs(workflow).items():
            python = "${{ matrix.python }}"
            runs = " ".join(step.get("run", "") for step in job["steps"])
            if python in runs:
                (setup,) = (s for s in job["steps"] if "python@" in s.get("uses", ""))
                assert setup["with"]["python-version"] == python, name


def test_every_python_that_is_promised_is_tested() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    tested = set(re.findall(r'python(?:-version)?: "(3\.\d+)"', texts))
    named = {c.rpartition(" ")[2] for c in project()["classifiers"] if ":: 3." in c}
    assert named == tested
    assert project()["requires-python"] == f">={min(named, key=_minor)}"


def _minor(version: str) -> int:
    return int(version.partition(".")[2])


def test_the_oldest_jax_is_the_same_everywhere() -> None:
    minor = oldest_jax().rpartition(".")[0]
    assert {"jax>=" + minor, "jaxlib>=" + minor} <= set(project()["dependencies"])
    assert f"jax ≥ {minor}" in read("README.md")
    assert f"| jax, jaxlib | {oldest_jax()} |" in read("CONTRIBUTING.md")


def test_the_floors_that_are_promised_are_those_of_the_project() -> None:
    extras = project()["optional-dependencies"]
    wanted = [*project()["dependencies"], *extras["flax"], *extras["checkpoint"]]
    for name in ("optax", "flax", "orbax-checkpoint"):
        (floor,) = (w.partition(">=")[2] for w in wanted if w.startswith(f"{name}>="))
        assert re.search(
            rf"^\| {name} \| {re.escape(floor)}\b", read("CONTRIBUTING.md"), re.M
        )


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == jmp_lite.__version__
    assert citation["license"] == project()["license"]
    assert citation["authors"] == project()["authors"]


def test_where_the_repository_is_is_written_in_one_place() -> None:
    urls = project()["urls"]
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    names = [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CITATION.cff",
        "mkdocs.yml",
    ]
    assert [name for name in names if urls["Repository"] in read(name)] == []
