"""The device: refusals, and what is recorded of it."""

import json
import os
import platform
import runpy
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
import torch.nn as nn

from config import Config
from errors import UserError
from runtime import device, metadata
from runtime.checkpoint import Training
from tests.helpers import SMALL


def test_devices_are_refused_by_name(train, refused):
    for name in ("gpu", "cuda:70", "cpu:1"):
        says = f"device = '{name}'; this machine has"
        refused(train, "run", f"--device={name}", says=(says, "cpu"))


def test_mps_takes_one_process(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="device = 'mps' takes one process, not 2"):
        device.open_device("auto" if torch.cuda.device_count() == 0 else "mps")


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0", "cuda:1"])
def test_a_rank_touches_its_own_gpu_alone(monkeypatch, name):
    """On another rank's GPU its CUDA context would take memory, or fail in exclusive mode."""
    touched = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda chosen: touched.append(str(chosen)))
    monkeypatch.setattr(torch, "ones", lambda *shape, device: touched.append(device))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device.open_device(name) == torch.device("cuda:3")
    assert touched == ["cuda:3", "cuda:3"]


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:1"])
def test_more_processes_than_gpus_are_refused(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "5")
    says = "LOCAL_RANK = 5.* torch sees 4 .*--nproc_per_node=4 or less"
    with pytest.raises(UserError, match=says):
        device.open_device(name)


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GeForce RTX 2080 Ti", None),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_mfu_is_the_share_of_the_gpus_peak(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: name)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda gpu: 3e6)
    measured = device.mfu_and_memory(torch.device("cuda"), flops_per_s=1e12)
    expected = {"memory_mb": 3.0}
    if peak is not None:
        expected["mfu"] = 1e12 / peak
    assert measured == expected


def test_bfloat16_is_automatic_only_where_the_named_gpu_computes_it(monkeypatch):
    """A T4 emulates it: cuda:0 here, and the current device."""
    current = [0]

    @contextmanager
    def using(gpu):
        current.append(gpu.index)
        yield
        current.pop()

    def supported(including_emulation=True):
        return including_emulation or current[-1] == 1

    monkeypatch.setattr(torch.cuda, "device", using)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert device.pick_dtype("auto", torch.device("cuda", 0)) == torch.float16
    assert device.pick_dtype("auto", torch.device("cuda", 1)) == torch.bfloat16


def test_models_are_compiled_on_cuda_unless_their_graphs_are_many(monkeypatch):
    monkeypatch.setattr(device, "check_compiler", lambda place: None)
    cuda = torch.device("cuda")
    assert device.pick_compile(None, cuda)
    assert not device.pick_compile(None, cuda, many_graphs=True)
    assert not device.pick_compile(None, torch.device("cpu"))


# ---- a GPU that torch cannot use ----


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine on which torch sees no GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_gpu_that_nvidia_smi_lists_and_torch_does_not_see_is_named(
    no_gpu, monkeypatch, tmp_path, name
):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho GPU 0: Tesla T4\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(UserError, match=r"cannot use this machine's GPU: .*; --device=cpu"):
        device.pick_device(name)
    assert device.pick_device("cpu").type == "cpu"
    smi.write_text("#!/bin/sh\nexit 6\n")  # a driver without a GPU
    assert device.pick_device().type == "cpu"


@pytest.mark.parametrize("hidden", device.NO_DEVICES)
def test_a_gpu_that_is_hidden_on_purpose_leaves_the_cpu(no_gpu, monkeypatch, hidden):
    monkeypatch.setattr(device, "nvidia_smi_works", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert device.pick_device().type == "cpu"


def old_driver(*arguments, **options):
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040). Please")


def test_a_driver_that_is_too_old_is_named_without_nvidia_smi(no_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", old_driver)
    monkeypatch.setattr(device, "nvidia_smi_works", lambda: False)
    with pytest.raises(UserError, match=r"GPU: The NVIDIA driver .* \(found version 12040\)\."):
        device.pick_device()


def test_a_gpu_that_fails_at_a_first_operation_is_named(monkeypatch):
    """As a V100, for which the wheel has no code; with an old driver NVML still lists GPUs."""

    def no_kernel(*arguments, **options):
        raise torch.AcceleratorError("CUDA error: no kernel image is available\nSearch for `cuda`")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for failure, words in ((no_kernel, "no kernel image is available"), (old_driver, "too old")):
        monkeypatch.setattr(torch, "ones", failure)
        with pytest.raises(UserError, match=f"cannot use cuda:1: .*{words}"):
            device.pick_device("cuda:1")


def test_a_gpu_that_other_processes_fill_is_no_gpu_that_torch_cannot_use(monkeypatch):
    def full(*arguments, **options):
        raise torch.AcceleratorError("CUDA error: out of memory\nSearch for `cuda`")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "ones", full)
    with pytest.raises(torch.AcceleratorError, match="out of memory"):
        device.pick_device()


@pytest.mark.parametrize(
    "kind, variable, compiler",
    [
        ("cuda", "CC", "gcc or clang"),
        ("cpu", "CXX", "g\\+\\+"),
    ],
)
def test_a_machine_without_a_compiler_is_told_what_compiling_needs(
    monkeypatch, tmp_path, kind, variable, compiler
):
    place = torch.device(kind)
    monkeypatch.delenv(variable, raising=False)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(UserError, match=rf"needs a compiler \({compiler}\).* --compile=False"):
            device.pick_compile(True, place)
        assert not device.pick_compile(False, place)
        patch.setenv(variable, sys.executable)  # by its path, it is there
        device.pick_compile(True, place)
    monkeypatch.setenv(variable, sys.executable)
    monkeypatch.setattr(device.sysconfig, "get_path", lambda *names: str(tmp_path))
    with pytest.raises(UserError, match=r"needs Python's headers \(.*Python\.h"):
        device.pick_compile(True, place)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None),
    ],
)
def test_the_allocators_segments_can_grow_unless_the_user_sets_it(
    monkeypatch, shards, tmp_path, settings, expected
):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    arguments = [*SMALL, "--dry_run", f"--data_dir={shards}", f"--out_dir={tmp_path / 'run'}"]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    runpy.run_path("train.py", run_name="__main__")
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


COUNT_FAULTS = """
import resource, torch
from runtime.device import keep_freed_memory
keep_freed_memory()
for i in range(30):
    if i == 20:  # by then the heap has grown to what it needs
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 16,384 pages
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_freed_memory_is_not_faulted_in_again():
    command = [sys.executable, "-c", COUNT_FAULTS]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 1000


# ---- what is recorded ----

AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@example.org")


def git(folder, *command):
    subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository of one file, instead of this one, where a user has configured diffs."""
    root = tmp_path / "repository"
    root.mkdir()
    (root / "model.py").write_text("one\ntwo\n")
    git(root, "init")
    settings = ("diff.external=/bin/echo", "color.ui=always", "diff.noprefix=true")
    for setting in (*settings, "diff.relative=true"):
        git(root, "config", *setting.split("="))
    git(root, "add", "model.py")
    git(root, *AUTHOR, "commit", "-m", "first")
    monkeypatch.setattr(device, "ROOT", root)
    return root


def test_a_repository_of_another_user(repository, monkeypatch):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert device.environment(torch.device("mps:0"))["commit"]  # as torch calls a Mac's GPU
    (repository / "mine.py").touch()
    assert device.environment(torch.device("cpu"))["modified"]
    monkeypatch.setattr(device, "ROOT", repository.parent)
    assert device.environment(torch.device("cpu"))["commit"] is None
    assert device.environment(torch.device("cpu"))["modified"] is None


def test_a_copy_inside_another_repository_has_no_commit(repository, monkeypatch, tmp_path):
    """Nor are changes of the other repository, such as a secret, part of the copy's patch."""
    (repository / "model.py").write_text("secret\n")
    copy = repository / "copy"
    copy.mkdir()
    (repository / ".gitignore").write_text("copy\n")
    monkeypatch.setattr(device, "ROOT", copy)
    recorded = device.environment(torch.device("cpu"))
    assert recorded["commit"] is None
    assert recorded["modified"] is None
    assert device.uncommitted() == b""
    # a folder of a repository with others has its own changes alone
    (copy / "train.py").touch()
    git(repository, "add", "--force", "copy/train.py")
    git(repository, *AUTHOR, "commit", "-m", "copy")
    assert device.environment(torch.device("cpu"))["commit"]
    assert not device.environment(torch.device("cpu"))["modified"]
    (copy / "train.py").write_text("three\n")
    assert device.environment(torch.device("cpu"))["modified"]
    (repository / ".gitignore").unlink()
    (copy / "mine.py").write_text("four\n")
    patch = tmp_path / "uncommitted.patch"
    patch.write_bytes(device.uncommitted())
    (copy / "mine.py").unlink()
    git(repository, "checkout", ".")
    git(copy, "apply", patch)
    assert (copy / "train.py").read_text() == "three\n"
    assert (copy / "mine.py").read_text() == "four\n"
    assert "secret" not in (repository / "model.py").read_text()


def started(run, resumed_at):
    """Record that a run starts, or is resumed at a step."""
    scaler = torch.amp.GradScaler("cpu")
    training = Training(nn.Linear(1, 1), torch.float32, [], scaler, resumed_at=resumed_at)
    config = Config(out_dir=str(run), resume=resumed_at is not None)
    metadata.write_run_metadata(config, {}, training)


def test_a_run_keeps_the_changes_that_its_commit_has_not(repository, tmp_path):
    """In patches that do not depend on the user's configuration of git."""
    run = tmp_path / "run"
    run.mkdir()
    started(run, None)
    assert not device.environment(torch.device("cpu"))["modified"]
    assert not (run / "uncommitted.patch").exists()
    (repository / "notes.txt").write_text("not tracked, and no code")
    assert not device.environment(torch.device("cpu"))["modified"]
    (repository / "mine.py").touch()
    assert device.environment(torch.device("cpu"))["modified"]
    changed = b"one\nthree\xff\0\n"  # a diff is bytes, whatever a file holds
    (repository / "model.py").write_bytes(changed)
    (repository / "mine.py").write_text("attention = 'mine'\n")
    started(run, None)
    saved = json.loads((run / "environment.json").read_text())
    assert saved["modified"]
    assert saved["commit"] == device.environment(torch.device("cpu"))["commit"]
    started(run, 200)
    patch = (run / "uncommitted.patch").read_bytes()
    assert (run / "uncommitted_000200.patch").read_bytes() == patch
    (repository / "mine.py").unlink()
    git(repository, "checkout", "model.py")
    # a start without changes does not hide the changes of an earlier start
    git(repository, "commit", "--allow-empty", "-m", "later")
    started(run, 400)
    resumed = json.loads((run / "environment.json").read_text())
    assert resumed["modified"]
    starts = [(start["step"], start["commit"], start["modified"]) for start in resumed["starts"]]
    first = saved["commit"]
    assert starts == [(0, first, True), (200, first, True), (400, resumed["commit"], False)]
    assert resumed["commit"] != first
    assert not (run / "uncommitted_000400.patch").exists()
    git(repository, "apply", run / "uncommitted.patch")
    assert (repository / "model.py").read_bytes() == changed
    assert (repository / "mine.py").read_text() == "attention = 'mine'\n"
