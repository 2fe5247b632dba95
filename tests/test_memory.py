"""The micro-batch that fits a GPU's memory."""

import os
from types import SimpleNamespace

import pytest
import torch

from layers.build import build_model
from runtime import memory
from runtime.config_files import load_config
from runtime.memory import EAGER, estimate, fitting_batch_size
from tests.helpers import CONFIGS

CUDA = torch.device("cuda")
BFLOAT16 = ("--dtype=bfloat16", "--compile=True")


@pytest.fixture
def gpu(monkeypatch):
    """Sets the memory of the GPU, in GB."""
    monkeypatch.setattr(memory, "pick_compile", lambda setting, device, many_graphs: setting)

    def set_memory(gigabytes):
        properties = SimpleNamespace(total_memory=gigabytes * 1e9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return set_memory


def config_of(name, *settings):
    return load_config([str(CONFIGS / name), *settings])


# peaks of torch's allocator in two steps of 4 layers in bfloat16, in MiB
@pytest.mark.parametrize(
    "name, sequences, peak, eager_peak",
    [
        ("softmax.py", 8, 3139, None),
        ("softmax.py", 16, 4159, 6221),
        ("lssar_p15.py", 16, 4378, 6626),
        ("t6.py", 16, 4819, 7135),
    ],
)
def test_the_estimate_is_near_the_allocators_peak(name, sequences, peak, eager_peak):
    config = config_of(name, "--n_layer=4")
    with torch.device("meta"):
        model = build_model(config)
    weights, loss, per_token = estimate(model)
    activations = loss + sequences * config.block_size * per_token
    assert 0.93 < (weights + activations) / (peak * 2**20) < 1.15
    if eager_peak is not None:
        assert 0.93 < (weights + EAGER * activations) / (eager_peak * 2**20) < 1.15


@pytest.mark.parametrize(
    "gigabytes, settings, fitting",
    [
        (80, (), 64),
        (40, (), 64),
        (24, (), 32),
        (16, (), 16),
        (80, ("--dtype=float32",), 64),
        (40, ("--dtype=float32",), 32),
        (16, ("--compile=False",), 8),
        (24, ("--block_size=8192",), 4),
        (1, (), 1),
        (1, ("--batch_size=48",), 32),  # memory does not limit a size that the user sets
    ],
)
def test_the_micro_batch_is_the_largest_divisor_that_fits(gpu, gigabytes, settings, fitting):
    gpu(gigabytes)
    config = config_of("softmax.py", *BFLOAT16, *settings)
    assert fitting_batch_size(config, 1, CUDA) == fitting
    assert fitting_batch_size(config, 16, CUDA) == min(fitting, 512 // 16)


@pytest.mark.parametrize(
    "gigabytes, processes, fitting",
    [(8, 1, 1), (24, 1, 8), (24, 2, 2), (512, 8, 32), (2048, 8, 64)],
)
def test_without_a_gpu_processes_share_the_memory_of_the_machine(
    monkeypatch, gigabytes, processes, fitting
):
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": gigabytes * 2**30 // 4096}
    monkeypatch.setattr(os, "sysconf", pages.get)
    config = config_of("softmax.py")
    assert fitting_batch_size(config, processes, torch.device("cpu")) == fitting
