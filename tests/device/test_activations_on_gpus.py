"""Activations kept as shares, and offloaded, on GPUs: four ranks share one."""

from tests.device.test_nccl_moves import on_gpu


def test_activations_on_gpus() -> None:
    on_gpu("activations_train", backend="nccl")


def test_offloaded_activations_on_gpus() -> None:
    on_gpu("activations_offload", backend="nccl")
