"""Sharded tensors and modules on GPUs: four ranks share one."""

from tests.device.test_nccl_moves import on_gpu


def test_sharded_tensors_on_gpus() -> None:
    on_gpu("sharded_tensors", "sharded_devices", backend="nccl")


def test_sharded_training_on_gpus() -> None:
    on_gpu("sharded_training", backend="nccl")
