"""The one place that turns a name into a device: what it refuses, and how."""

import pytest
import torch

from runtime.world.device import backend_of, device_of, kind_of_device, launched_device


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_without_a_gpu_cuda_is_refused_in_one_line(no_gpu):
    with pytest.raises(ValueError, match=r"device cuda: torch .* sees no GPU here; want cpu"):
        device_of("cuda")


def test_without_a_gpu_no_name_is_the_cpu(no_gpu):
    assert device_of(None) == device_of("cpu") == torch.device("cpu")


def test_a_gpu_that_is_there_is_not_taken_by_those_who_want_the_cpu(two_gpus):
    assert device_of("cpu") == torch.device("cpu")
    assert two_gpus == []


def test_each_local_rank_gets_its_gpu(two_gpus):
    assert launched_device(None, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == torch.device("cuda", 1)
    assert two_gpus == [torch.device("cuda", 1)]


def test_more_ranks_than_gpus_are_refused(two_gpus):
    with pytest.raises(ValueError, match="4 ranks of this machine want a GPU each, it has 2"):
        launched_device("cuda", {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="device 'tpu': want one of cpu, cuda"):
        device_of("tpu")


def test_the_backend_follows_the_device():
    assert backend_of(torch.device("cpu")) == "gloo"
    assert backend_of(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"


def test_kinds_are_what_profiles_call_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert kind_of_device(torch.device("cuda", 1)) == "H100"
    assert kind_of_device(torch.device("cpu")) == "cpu"
