"""Devices to compile for: which are known, and what is said without a compiler."""

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from jmp_lite import memory
from jmp_lite._src.memory import devices


def test_devices_say_what_they_have():
    named = ["h100", "h200", "a100", "v100", "l4", "rtx4090", "b200"]
    tpus = ["v5e", "v5p", "v6e"]
    assert memory.DEVICES.keys() == {*named, *tpus, "cpu"}
    assert all(memory.DEVICES[name].memory for name in named + tpus)
    assert [name for name in named if memory.DEVICES[name].is_tpu] == []
    with_fp8 = [name for name in named if memory.DEVICES[name].has_fp8]
    assert with_fp8 == ["h100", "h200", "l4", "rtx4090", "b200"]
    title = memory.DEVICES["l4"].title
    assert title == "NVIDIA L4 (compiled for, not run on)"


def test_a_mesh_has_the_axes_that_are_asked_for():
    mesh = memory.mesh("cpu", data=2, model=4)
    assert dict(mesh.shape) == {"data": 2, "model": 4}
    assert mesh == memory.mesh("cpu", data=2, model=4)
    assert dict(memory.mesh("cpu").shape) == {"data": 1}


def test_what_is_not_known_is_named_with_what_is():
    with pytest.raises(
        ValueError, match="Expected device to be one of .'h100', .*'h300'"
    ):
        memory.mesh("h300")
    with pytest.raises(ValueError, match=f"at most {jax.device_count()} of 'cpu'"):
        memory.mesh("cpu", data=64)


@pytest.mark.parametrize(
    ("device", "library", "extra"),
    [("h100", "jax_plugins", "memory-gpu"), ("v5e", "libtpu", "memory-tpu")],
)
def test_a_missing_compiler_is_named_with_its_command(device, library, extra):
    if importlib.util.find_spec(library):
        assert memory.mesh(device, data=2).size == 2
        return
    with pytest.raises(ModuleNotFoundError) as error:
        memory.mesh(device)
    assert f'pip install "jmp-lite[{extra}]"' in str(error.value)


def test_two_threads_get_the_same_devices(monkeypatch):
    def slowly(config, count):
        del config
        time.sleep(0.1)
        return [object() for _ in range(count)]

    monkeypatch.setattr(devices.compat, "gpus_to_compile_for", slowly)
    monkeypatch.setattr(devices, "Mesh", lambda found, axes: list(found))
    devices._devices.cache_clear()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(devices.mesh, ["h100", "h100"])
    devices._devices.cache_clear()
    assert first == second
