"""What is no checkpoint of ours stays as it is, and no link is followed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from checkpoints import contents, names, refusal

from jmp_lite import checkpoint
from jmp_lite._src.checkpoint import folder as folders

LIKE = {"x": 0}


def note(path: Path, text: str = "mine") -> Path:
    """Write a file and its folders; return the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def record(text: str) -> Callable[[Path], object]:
    return lambda path: note(path / "record" / "metadata", text)


FOREIGN = {  # what a user may have at a path of digits
    "a folder": lambda path: note(path / "notes.txt"),
    "a file": note,
    "a folder called record": lambda path: note(path / "record" / "tape.wav"),
    "an empty record": lambda path: (path / "record").mkdir(parents=True),
    "no JSON": record("my tapes"),
    "no record": record('{"crc32": 5}'),
    "JSON of another type": record("[]"),
    "JSON that is too deep": record("[" * 100_000),
}


# Folders that are not checkpoints.


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_not_ours_is_neither_counted_nor_touched(
    kind: str, tmp_path: Path
) -> None:
    for name in ("0", "2", "2024", "replaced_7", "replaced_9"):
        FOREIGN[kind](tmp_path / name)
    before = contents(tmp_path)
    is_like_ours = "JSON" in kind or kind == "no record"  # may be ours, damaged
    assert checkpoint.latest_step(tmp_path) == (2024 if is_like_ours else None)
    for step in (3000, 3001, 3002):
        checkpoint.save(tmp_path, {"x": step}, step=step, keep=2)
    assert {k: v for k, v in contents(tmp_path).items() if k in before} == before
    assert {*names(tmp_path)} >= {"0", "2", "2024", "replaced_7", "3001", "3002"}
    assert "3000" not in names(tmp_path)  # which keep counts
    assert checkpoint.restore(tmp_path, LIKE).state == {"x": 3002}


@pytest.mark.parametrize("name", ["4000", "replaced_4000"])
def test_what_would_be_replaced_is_refused(name: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"x": 1}, step=1)
    for kind, make in FOREIGN.items():
        make(tmp_path / name)
        before = contents(tmp_path)
        assert refusal(checkpoint.save, tmp_path, {"x": 2}, step=4000, keep=1) == (
            f"{tmp_path / name} holds no record of jmp_lite that can be read: save "
            "would replace it. Move it away, or save to another folder."
        ), kind
        assert contents(tmp_path) == before
        (tmp_path / name).rename(tmp_path / f"away, {kind}")


def test_other_ways_to_write_a_number_are_names(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"x": 1}, step=1)
    for name in ("07", "٣", "²", "1e3", "+8", "-9", "0x10", "5.0", "1 ", "best"):
        shutil.copytree(tmp_path / "1", tmp_path / name)
    before = names(tmp_path)
    assert checkpoint.latest_step(tmp_path) == 1
    checkpoint.save(tmp_path, {"x": 2}, step=2, keep=1)
    assert names(tmp_path) == sorted({*before, "2"} - {"1"})


def test_what_a_killed_save_has_left_is_removed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"x": 1}, step=1)
    for name in ("2/state/d", "1", "replaced_1"):
        note(tmp_path / ".jmp_lite_saving" / name / "half")
    assert checkpoint.latest_step(tmp_path) == 1
    checkpoint.save(tmp_path, {"x": 2}, step=2)
    assert names(tmp_path) == ["1", "2"]


# Links.


def test_a_link_to_a_step_is_refused(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    checkpoint.save(elsewhere, {"x": 5}, step=5)
    for step in (6, 7):
        checkpoint.save(run, {"x": step}, step=step)
    for name in ("5", "7", "8", "replaced_7"):
        shutil.rmtree(run / name, ignore_errors=True)
        (run / name).symlink_to(elsewhere / "5", target_is_directory=True)
        before = contents(tmp_path)
        for use in (
            lambda: checkpoint.save(run, {"x": 9}, step=9, keep=1),
            lambda: checkpoint.save(run, {"x": 7}, step=7),
            lambda: checkpoint.restore(run, LIKE),
            lambda: checkpoint.latest_step(run),
        ):
            assert refusal(use) == (
                f"{run / name} is a link, and jmp_lite follows none in a folder of "
                "checkpoints: put a copy in its place."
            )
        assert contents(tmp_path) == before
        (run / name).unlink()
    (run / "best").symlink_to(elsewhere / "5", target_is_directory=True)
    checkpoint.save(run, {"x": 8}, step=8, keep=1)
    assert names(run) == ["8", "best"] and names(elsewhere / "5")


@pytest.mark.parametrize(
    "name", ["record", "record/metadata", "state", "state/manifest.ocdbt", "state/d"]
)
def test_a_link_in_a_step_is_not_followed(name: str, tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    checkpoint.save(run, {"x": 3}, step=3)
    (run / "3" / name).rename(away)
    (run / "3" / name).symlink_to(away)
    before = contents(away)
    text = refusal(checkpoint.restore, run, LIKE)
    link = run / "3" / name
    assert f"{link} is a link" in text or f"no checkpoint in {run}" in text
    if name.startswith("record"):
        text = refusal(checkpoint.save, run, {"x": 4}, step=3)
        assert f"{run / '3'} holds no record" in text
    checkpoint.save(run, {"x": 4}, step=4, keep=1)
    assert contents(away) == before


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "real")
    checkpoint.save(tmp_path / "run", {"x": 3}, step=3)
    assert checkpoint.restore(tmp_path / "real", LIKE).state == {"x": 3}
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    for folder in (tmp_path / "lost", tmp_path / "lost" / "run"):
        text = refusal(checkpoint.save, folder, {"x": 3}, step=3)
        assert text.endswith(f"{tmp_path / 'lost'} is no folder.")


@pytest.mark.parametrize("place", [os.symlink, os.link, shutil.copy, "folder", "fifo"])
def test_a_lock_that_is_not_ours_is_not_written_to(place, tmp_path: Path) -> None:
    text = "" if place is os.link else "mine"  # an empty lock has just been made
    run, outside = tmp_path / "run", note(tmp_path / "outside", text)
    checkpoint.save(run, {"x": 1}, step=1)
    lock = run / ".writer"
    if place == "folder":
        lock.mkdir()
    elif place == "fifo":
        os.mkfifo(lock)
    else:
        place(outside, lock)
    for step in (1, 2):
        assert refusal(checkpoint.save, run, {"x": 2}, step=step) == (
            f"{lock} is not a lock file of jmp_lite, or it is a link: save would write "
            "to it. Move it away, or save to another folder."
        )
    assert outside.read_text() == text and names(run) == [".writer", "1"]
    assert checkpoint.restore(run, LIKE).state == {"x": 1}


def test_what_a_save_would_write_to_is_no_link(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", note(tmp_path / "outside" / "notes.txt").parent
    run.mkdir()
    for name, target, text in (
        (".writer", tmp_path / "new", "is not a lock file"),  # there is no such file
        (".jmp_lite_saving", outside, "is a link"),
    ):
        (run / name).symlink_to(target)
        assert f"{name} {text}" in refusal(checkpoint.save, run, {"x": 2}, step=1)
        assert names(outside) == ["notes.txt"] and names(run) == [name]
        assert names(tmp_path) == ["outside", "run"]
        (run / name).unlink()


# Names of folders and of leaves.


@pytest.mark.parametrize("below", ["", "run"])
def test_a_path_that_orbax_takes_for_another_is_refused(
    below: str, tmp_path: Path
) -> None:
    run, state = tmp_path / "other", {"x": jnp.ones(2)}
    checkpoint.save(run, state, step=1)
    for name in ("a[0]", "a[b", "a*", "a?"):  # it takes them for patterns
        folder = tmp_path / name / below
        text = f"valid Unicode without \\ * ? [, got {str(folder)!r}: Orbax would take"
        assert text in refusal(checkpoint.save, folder, state, step=1)
        assert names(tmp_path) == ["other"]
        # One that was moved there can be read.
        folder.parent.mkdir(exist_ok=True)
        run.rename(folder)
        assert (checkpoint.restore(folder, state).state["x"] == 1).all()
        folder.rename(run)
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    for name in ("a\\b", os.fsdecode(b"\xff"), "a\0b"):
        folder = tmp_path / name / below
        for refused, use in (
            ("\\ * ? [", lambda folder: checkpoint.save(folder, state, step=1)),
            ("\\", lambda folder: checkpoint.restore(folder, state)),
            ("\\", checkpoint.latest_step),
        ):
            assert refusal(use, folder) == (
                f"Expected a path of valid Unicode without {refused}, got "
                f"{os.fspath(folder)!r}: Orbax would take it for another folder. Use "
                "another name."
            )
    assert names(tmp_path) == ["other"]


def test_no_path_is_not_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = ", got '': Orbax would take it for another folder"
    assert text in refusal(checkpoint.save, "", {"x": 1}, step=1)
    assert text in refusal(checkpoint.restore, "", LIKE)
    assert text in refusal(checkpoint.latest_step, "")
    assert names(tmp_path) == []
    checkpoint.save(".", {"x": 1}, step=1)
    assert names(tmp_path) == ["1"]


ODD = ["a]b", " a ", "ü 日本", "a\nb\t", "a#b", "50%", "%2F", "~x", "$HOME", "-"]
ODD += ["..a", "a..", "...", "a{b,c}", "x" * 200, "7", "state", "record", "a:b", "a'\""]


def test_a_folder_may_have_any_other_name(tmp_path: Path) -> None:
    folder, state = tmp_path.joinpath(*ODD), {"x": jnp.arange(3), "n": 5}
    checkpoint.save(folder, state, step=1)
    assert names(folder) == ["1"]
    for parent, name in zip(reversed(folder.parents), folder.parts[1:], strict=True):
        assert name in os.listdir(parent)
    restored = checkpoint.restore(folder, jax.tree.map(jnp.zeros_like, state)).state
    assert restored["x"].tolist() == [0, 1, 2] and restored["n"] == 5


def test_a_leaf_may_have_any_name(tmp_path: Path) -> None:
    odd = [*ODD, "a[0]", "a*", "a?", "a\\b", "a/b", ".", "..", "", "/", "a/", "a/../b"]
    odd += ["A", "a", "0", ".zarray", "a/.zarray", "a\0b", "\udcff", "x" * 5000]
    arrays = {name: jnp.full(2, i) for i, name in enumerate(odd)}
    state = {**arrays, "below": {name: i for i, name in enumerate(odd)}}
    checkpoint.save(tmp_path, state, step=1)
    restored = checkpoint.restore(tmp_path, state).state
    for i, name in enumerate(odd):
        assert restored[name].tolist() == [i, i] and restored["below"][name] == i
    assert names(tmp_path) == ["1"]


@pytest.mark.parametrize("step", [2**63, 10**30, 1e30, float("inf")])
def test_a_step_has_63_bits(step: float, tmp_path: Path) -> None:
    text = refusal(checkpoint.save, tmp_path / "run", {"x": 1}, step=step)
    assert f"of at least 0, got {step!r}: pass step=, below 2**63, or" in text
    assert names(tmp_path) == []


# Google Cloud Storage, where a folder cannot be renamed.


def test_on_gcs_a_step_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_is_gcs", lambda path: True)
    for step in (1, 2, 2, 3):
        checkpoint.save(tmp_path, {"x": jnp.full(2, step)}, step=step, keep=2)
    assert names(tmp_path) == ["2", "3"]
    shutil.copytree(tmp_path / "3", tmp_path / "4")
    (tmp_path / "4" / "commit_success.txt").unlink()  # killed before it was complete
    assert checkpoint.latest_step(tmp_path) == 3
    checkpoint.save(tmp_path, {"x": jnp.full(2, 4)}, step=4, keep=1)
    assert names(tmp_path) == ["4"]
    assert checkpoint.restore(tmp_path, {"x": jnp.ones(2, int)}).state["x"][0] == 4
    note(tmp_path / "5" / "notes.txt")
    assert "5 holds no record" in refusal(checkpoint.save, tmp_path, {"x": 1}, step=5)
