"""Weights of an FSDP2 trainer into vLLM workers: vLLM's own sync and reshard, interleaved.

    python benchmarks/weight_sync.py [--repeat 5] [--quick] [--json]

Ranks 0 and 1 train a Llama-3-8B with every dim divided by 8 under FSDP2; ranks 2 and 3 hold vLLM's
model of it, tensor parallel, with fused qkv and gate_up. vLLM's side is vLLM's code: its trainer
engine, its worker engine and the loader of its model (`vllm.distributed.weight_transfer`, backend
`nccl`). Three things are replaced, because there is no GPU: the NCCL communicator by a gloo group,
CUDA streams by nothing (copies on a CPU are done when they return), and HTTP requests by a store.
Both contenders write the parameters of the same vLLM model, and are compared bit by bit first.

Bytes received are those of tensors: of vLLM's broadcasts and of `full_tensor()` among trainers.
Memory is the peak of a rank's resident memory during a sync, above what it had before. Times also
compare transports: `reshard` reads peer memory on one host, `reshard over gloo` uses sockets too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.metadata
import itertools
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from side_by_side import Row, arguments, run_ranks, tell
from torch.distributed.device_mesh import DeviceMesh

import reshard as rs

TRAINERS, WORKERS = (0, 1), (2, 3)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1792,
    "vocab_size": 16032,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
NAMES = {
    "model.layers.{i}.self_attn.qkv_proj.weight": rs.join(
        *(f"model.layers.{{i}}.self_attn.{part}_proj.weight" for part in "qkv"), dim=0
    ),
    "model.layers.{i}.mlp.gate_up_proj.weight": rs.join(
        *(f"model.layers.{{i}}.mlp.{part}_proj.weight" for part in ("gate", "up")), dim=0
    ),
}
MODES: dict[str, dict[str, Any]] = {
    "vLLM, packed in 1 GiB": {"packed": True},
    "vLLM, packed in 16 MiB": {"packed": True, "packed_buffer_size_bytes": 16 << 20},
    "vLLM, one by one": {"packed": False},
}
"""1 GiB is vLLM's default, for models 64 times as large as this one: 16 MiB is to this model what
1 GiB is to Llama-3-8B."""


def main() -> None:
    args = arguments(__doc__).parse_args()
    logging.disable(logging.WARNING)  # vLLM says that rotary embeddings have no weights to load
    try:
        import vllm.platforms
        from vllm.platforms.cpu import CpuPlatform
    except ImportError as error:
        sys.exit(print(f"skipped: this benchmark needs vllm and what it imports; {error}"))
    vllm.platforms._current_platform = CpuPlatform()  # a wheel for CUDA does not look for CPUs
    replace_streams()
    with tempfile.TemporaryDirectory() as folder:
        layers = 4 if args.quick else CONFIG["num_hidden_layers"]
        Path(folder, "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
        args.folder = folder
        run_ranks(4, on_a_rank, args)


class NoStream:
    """Stands for a CUDA stream or event: everything is done in order, before the call returns."""

    def __init__(self, *args: object, **options: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: None


def replace_streams() -> None:
    """What vLLM's engines ask of an accelerator, where there is none."""
    torch.cuda.Stream = torch.Event = NoStream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_stream = torch.accelerator.current_stream = NoStream
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda: None
    torch.Tensor.record_stream = lambda tensor, stream: None


class GlooCommunicator:
    """Stands for vLLM's PyNcclCommunicator, and counts the bytes that a rank receives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.received = group, 0

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        dist.broadcast(tensor.view(torch.uint8), group_src=src, group=self.group)
        if dist.get_rank(self.group) != src:
            self.received += tensor.nbytes

    def destroy(self) -> None: ...


class StoreClient:
    """What vLLM's trainer tells the workers, through a store; a worker takes it with `served`."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.round = store, 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.store.set("init", json.dumps(init_info))

    def start_weight_update(self) -> None:
        self.round += 1

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.store.set(f"update {self.round}", json.dumps(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.store.wait([f"finished {self.round} {rank}" for rank in WORKERS])


def on_a_rank(rank: int, args: argparse.Namespace) -> None:
    from vllm.distributed import parallel_state
    from vllm.distributed.weight_transfer import nccl_common

    group = dist.new_group([0, *WORKERS])
    nccl_common.stateless_init_process_group = lambda *args, **options: GlooCommunicator(group)
    mesh = DeviceMesh("cpu", list(TRAINERS), mesh_dim_names=("fsdp",))
    config = vllm_config(args.folder, rank)
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(4, rank, local_rank=rank, backend="gloo")
        parallel_state.initialize_model_parallel(2)  # groups 0, 1 and 2, 3: only the second is used
        side = Trainer(args.folder, mesh) if rank in TRAINERS else Worker(config)
        tell([measured(side, rank, 2 if args.quick else args.repeat)], rank, args.json)


def vllm_config(folder: str, rank: int) -> Any:
    from vllm.config import DeviceConfig, ModelConfig, ParallelConfig, VllmConfig

    model = ModelConfig(
        model=folder,
        tokenizer=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
    )
    parallel = ParallelConfig(tensor_parallel_size=len(WORKERS))
    config = VllmConfig(
        model_config=model, parallel_config=parallel, device_config=DeviceConfig(device="cpu")
    )
    config.parallel_config.rank = max(rank - WORKERS[0], 0)
    return config


@dataclass
class Sync:
    """A contender on one rank: one sync, and the bytes that the last one brought here."""

    run: Callable[[], object]
    received: Callable[[], int]


class Trainer:
    """A rank with a model of transformers under FSDP2."""

    def __init__(self, folder: str, mesh: DeviceMesh) -> None:
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoConfig, LlamaForCausalLM

        torch.manual_seed(0)
        self.model = LlamaForCausalLM(AutoConfig.from_pretrained(folder)).bfloat16()
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.weights = dict(self.model.named_parameters())
        self.served: dict[str, torch.Tensor] = {}
        have, want = rs.exchange(have=rs.describe(self.weights))
        self.plan = planned(have, want)

    def vllm_sync(self, mode: dict[str, Any], store: dist.Store) -> Sync:
        from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(
            "127.0.0.1", 1, 1 + len(WORKERS), rank=dist.get_rank(), **mode
        )  # the address is not used: the group is already there
        engine = WeightTransferTrainerFactory.trainer_init(
            info, client=StoreClient(store), source=ModuleSource(self.model)
        )
        return Sync(engine.send_weights, lambda: gathered(self.weights))


class Worker:
    """A rank with vLLM's model, tensor parallel."""

    def __init__(self, config: Any) -> None:
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
        from vllm.model_executor.model_loader.utils import initialize_model

        torch.set_default_dtype(torch.bfloat16)
        self.config, self.model = config, initialize_model(config)
        torch.set_default_dtype(torch.float32)
        record_metadata_for_reloading(self.model)
        self.weights: dict[str, torch.Tensor] = {}
        self.served = dict(self.model.named_parameters())
        specs = {name: spec_of(name, value) for name, value in self.served.items()}
        have, want = rs.exchange(want=specs)
        self.plan = planned(have, want)

    def vllm_sync(self, mode: dict[str, Any], store: dist.Store) -> Sync:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory

        engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend="nccl"), self.config, torch.device("cpu"), self.model
        )
        engine.init_transfer_engine(engine.parse_init_info(json.loads(store.get("init"))))
        rounds = itertools.count(1)

        def serve() -> None:
            number = next(rounds)
            engine.model_update_group.received = 0
            engine.start_weight_update()
            engine.update_weights(json.loads(store.get(f"update {number}")))
            engine.finish_weight_update()
            store.set(f"finished {number} {dist.get_rank()}", "")

        return Sync(serve, lambda: engine.model_update_group.received)


def gathered(weights: dict[str, Any]) -> int:
    """Bytes that `full_tensor()` of every parameter brings to this rank."""
    return sum(one.nbytes - one.to_local().nbytes for one in weights.values())


def spec_of(name: str, local: torch.Tensor) -> rs.TensorSpec:
    """The layout of a parameter of vLLM's Llama over the workers, by its name."""
    heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    size = CONFIG["hidden_size"] // heads
    segments = {
        "qkv_proj": f"tp{{{heads * size},{kv_heads * size},{kv_heads * size}}} -",
        "gate_up_proj": f"tp{{{CONFIG['intermediate_size']},{CONFIG['intermediate_size']}}} -",
        "o_proj": "- tp",
        "down_proj": "- tp",
        "embed_tokens": "tp -",
        "lm_head": "tp -",
    }
    words = segments.get(name.split(".")[-2], "...")
    layout = rs.Layout(rs.Mesh(tp=len(WORKERS), ranks=WORKERS), words)
    cut = {"t": 0, "-": 1}.get(words[0])
    shape = tuple(n * len(WORKERS) if dim == cut else n for dim, n in enumerate(local.shape))
    return rs.TensorSpec(shape, "bfloat16", layout)


def planned(have: rs.Specs, want: rs.Specs) -> rs.Plan:
    """vLLM pads the vocabulary to whole tiles, which is part of the plan."""
    pads = {
        name: rs.take(name, pad={0: want[name].shape[0]})
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    return rs.plan(have, want, names=NAMES | pads)


def measured(side: Trainer | Worker, rank: int, repeat: int) -> Row:
    """Bytes, memory and seconds of every contender, in turn; the first turn warms up."""
    plan, port = side.plan, [0]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
    if store is not None:
        port = [store.port]
    dist.broadcast_object_list(port)
    store = store or dist.TCPStore("127.0.0.1", port[0])
    received = plan.for_rank(rank).receives.num_bytes
    syncs = {
        "reshard": Sync(lambda: plan.run(side.weights, into=side.served), lambda: received),
        "reshard over gloo": Sync(
            lambda: plan.run(side.weights, into=side.served, transport="network"), lambda: received
        ),
    }
    for name, mode in MODES.items():
        syncs[name] = side.vllm_sync(mode, dist.PrefixStore(name, store))
    compare(side, syncs)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in syncs}
    for turn in range(repeat + 1):
        for name, sync in syncs.items():
            figures = of_all_ranks(sync)
            if turn:
                found[name].append(figures)
    medians = {name: torch.stack(rows).median(0).values for name, rows in found.items()}
    for name, sync in syncs.items():
        plan.release()  # with the buffers that it keeps between runs
        medians[name][:, 1] = of_all_ranks(sync, trim=True)[:, 1]
    return {
        "name": f"{len(plan.have)} tensors, {total_bytes(plan) / 2**20:.0f} MiB, FSDP2 on 2 ranks"
        f" to vLLM {importlib.metadata.version('vllm')} with tp=2",
        "seconds": {name: float(rows[:, 2].max()) for name, rows in medians.items()},
        "facts": {name: in_words(rows) for name, rows in medians.items()},
        "checks": [],
    }


def total_bytes(plan: rs.Plan) -> int:
    return sum(torch.Size(spec.shape).numel() * 2 for spec in plan.have.values())


def in_words(rows: torch.Tensor) -> str:
    """Rows are ranks; columns are bytes received, peak memory, seconds and CPU seconds."""
    parts = []
    for kind, ranks in (("trainer", TRAINERS), ("worker", WORKERS)):
        bytes_, memory = (rows[list(ranks), column].max() / 2**20 for column in (0, 1))
        parts.append(f"a {kind} receives {bytes_:.1f} MiB and needs {memory:.1f} MiB more memory")
    return f"{', '.join(parts)}, {rows[:, 3].sum():.2f} CPU seconds of all ranks"


def of_all_ranks(sync: Sync, trim: bool = False) -> torch.Tensor:
    """Run a sync on all ranks: a row for each, with what was measured on it.

    Memory that earlier syncs freed and malloc kept hides what this one needs: `trim` returns it to
    the system first, which makes the next allocations slower, so its times do not count.
    """
    gc.collect()
    if trim:
        ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before, began, spent = resident("VmRSS"), time.perf_counter(), time.process_time()
    sync.run()
    took, used = time.perf_counter() - began, time.process_time() - spent
    peak = max(resident("VmHWM") - before, 0)
    mine = torch.tensor([sync.received(), peak, took, used], dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return torch.stack(rows)


def resident(field: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def compare(side: Trainer | Worker, syncs: dict[str, Sync]) -> None:
    """Every contender writes the same bits into every parameter of the workers."""
    first: dict[str, torch.Tensor] | None = None
    for name, sync in syncs.items():
        for value in side.served.values():
            value.data.fill_(-1)
        sync.run()
        now = {key: value.detach().clone() for key, value in side.served.items()}
        first = first or now
        wrong = [key for key, value in now.items() if not torch.equal(value, first[key])]
        assert not wrong, f"{name} and reshard differ in {wrong[:3]}"


if __name__ == "__main__":
    main()
