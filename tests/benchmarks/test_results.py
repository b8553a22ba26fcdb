"""Results name the code they were measured with, and committed ones only such code."""

import subprocess
from pathlib import Path

import jax
import pytest
import typer

from examples.common import cli, results

_FILES = (
    *("jmp_lite/policy.py", "examples/digits.py", "benchmarks/memory.py"),
    *("pyproject.toml", "README.md", "tests/test_policy.py", "benchmarks/README.md"),
    "benchmarks/results/cpu/memory.json",
)


@pytest.fixture
def repository(tmp_path) -> Path:
    """Return a repository with a commit of this project's shape."""
    for name in _FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("committed\n")
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    who = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    for args in (["init", "-qb", "main"], ["add", "."], [*who, "commit", "-qm", "all"]):
        subprocess.run(["git", *args], cwd=tmp_path, check=True)
    return tmp_path


def test_a_clean_tree_has_the_name_of_its_commit_and_a_copy_of_it_has_none(repository):
    head = (repository / ".git/refs/heads/main").read_text()
    assert results.git_revision(repository) == head[:12]
    assert results.changes(repository) == []
    assert results.why_not_into(repository / "benchmarks/results/cpu", repository) == ""
    copy = repository / "unpacked"
    copy.mkdir()
    assert results.git_revision(copy) == ""
    out = copy / "benchmarks" / "results"
    assert "and this is no git repository." in results.why_not_into(out, copy)


@pytest.mark.parametrize(
    ("name", "new"), [(_FILES[0], False), (_FILES[1], True), (_FILES[2], False)]
)
def test_changed_and_new_code_makes_a_tree_dirty(repository, name, new):
    path = (repository / name).with_stem("new") if new else repository / name
    path.write_text("another\n")
    changed = str(path.relative_to(repository))
    assert results.changes(repository) == [changed]
    assert results.git_revision(repository).endswith("-dirty")
    out = repository / "benchmarks" / "results" / "cpu"
    assert results.why_not_into(out, repository) == (
        f"{out} is for results of committed code, and these files differ from the "
        f"commit: {changed}. Commit first, or write to another folder."
    )
    assert results.why_not_into(repository / "out", repository) == ""
    link = repository / "link"
    link.symlink_to(out.parent)
    assert results.why_not_into(link / "cpu", repository)


def test_what_no_figure_depends_on_does_not(repository):
    for name in (
        "README.md",
        "tests/test_policy.py",
        "benchmarks/README.md",
        *(f"benchmarks/results/cpu/{x}.json" for x in ("memory", "new")),
        "jmp_lite/__pycache__/policy.pyc",
    ):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("another\n")
        assert results.changes(repository) == [], name
    assert not results.git_revision(repository).endswith("-dirty")


def test_the_option_refuses_before_anything_is_measured(monkeypatch, tmp_path):
    assert cli.make_out(tmp_path / "out") == tmp_path / "out"
    assert (tmp_path / "out").is_dir()
    monkeypatch.setattr(results, "why_not_into", lambda out: f"not into {out}")
    with pytest.raises(typer.BadParameter, match="not into"):
        cli.make_out(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_provenance_names_command_device_revision_and_versions():
    found = results.provenance()
    assert found["command"].startswith("python ")
    assert found["device"] == jax.local_devices()[0].device_kind
    assert found["versions"]["jax"] == jax.__version__
    assert found["git"] == results.git_revision()
    assert results.provenance("NVIDIA H100")["device"] == "NVIDIA H100"
