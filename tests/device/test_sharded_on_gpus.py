"""Sharded tensors and modules on GPUs: four ranks share one."""

from tests.device.test_nccl_moves import on_gpu


def test_sharded_tensors_on_gpus() -> None:
    on_gpu("sharded_tensors", backend="nccl")


def test_sharded_tensors_that_go_to_the_host_and_back() -> None:
    on_gpu("sharded_devices", backend="nccl", transport="auto")


def test_sharded_training_on_gpus() -> None:
    on_gpu("sharded_training", backend="nccl")
