"""Which way data goes between GPUs, for every pair of ranks, and why.

Every rank says which GPU it has and gives a handle of a little memory there. Each rank of the same
host tries to read it: so permissions, namespaces, drivers and links between GPUs are not guessed
but tried. The ranks exchange what they found, so all of them choose alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from reshard.errors import LiveError
from reshard.live.copy.cuda_driver import CudaError
from reshard.live.failure.agreement import await_all
from reshard.live.failure.watch import Watch
from reshard.live.inputs.bound import GPU, all_on_gpus
from reshard.live.inputs.request import GPU_TRANSPORTS
from reshard.live.session.control import Cause
from reshard.live.session.rendezvous import Connections, Resource
from reshard.live.transport.gpu_memory import GpuMemory, has_gpu
from reshard.planning.plans import Plan

Pair = tuple[int, int]
"""Two ranks, the lower one first."""

Facts = Mapping[int, Mapping[str, Any]]
"""By rank: its GPU, the handle and the content of its probe, whether its group has NCCL."""

PROBE_BYTES = 4096


@dataclass(frozen=True)
class GpuRoutes:
    """How each pair of ranks exchanges data in the calls of a plan."""

    why_not: Mapping[Pair, str]
    """Pairs that exchange something and cannot read each other's GPU memory, and the reason."""
    uses_nccl: bool  # whether these pairs use NCCL; otherwise their data goes by way of the host
    forced: str = ""  # the transport that was forced for all pairs

    def reads(self, one: int, other: int) -> bool:
        """Whether two ranks read each other's GPU memory."""
        return self.forced != "nccl" and _pair(one, other) not in self.why_not

    def reason(self, one: int, other: int) -> str:
        """Why they do not, for the report."""
        return self.why_not.get(_pair(one, other), "")

    @property
    def opens_nccl(self) -> bool:
        """Whether any pair needs NCCL: all ranks open it together."""
        return self.forced == "nccl" or (self.uses_nccl and bool(self.why_not))


class GpuTrials(Resource):
    """What a session knows of its GPUs: which ranks can read the memory of which."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._probes: dict[torch.device, dict[str, Any]] = {}
        self._allocated: list[tuple[torch.device, int]] = []
        self._known: dict[str, dict[Pair, str]] = {}
        """By the digest of all facts, why pairs cannot read each other's memory."""

    def facts(self, device: torch.device | None, has_nccl: bool) -> str:
        """What this rank tells the others; without a device it has no tensors."""
        facts: dict[str, Any] = {"nccl": has_nccl, "nccl host": os.environ.get("NCCL_HOSTID", "")}
        if device is None:
            facts["idle"] = has_gpu()
        else:
            if device not in self._probes:
                self._probes[device] = self._probe(device)
            facts |= self._probes[device]
        return json.dumps(facts, sort_keys=True)

    def _probe(self, device: torch.device) -> dict[str, Any]:
        """Memory on this rank's GPU that others try to read; or why there is none."""
        try:
            memory = self._connections.resource(GpuMemory)
            with memory.using(device):
                gpu, word = memory.driver.gpu_of(device), secrets.randbits(62)
                address = memory.driver.allocate(PROBE_BYTES)
                self._allocated.append((device, address))
                memory.driver.write_word(address, word)
                handle = memory.driver.export(memory.driver.allocation(address).base).hex()
                _ = memory.signals  # the GPU must also reach memory of the host
                return {"gpu": gpu, "handle": handle, "word": word}
        except (CudaError, LiveError, RuntimeError) as error:
            return {"gpu": "", "error": str(error)}

    def settle(
        self, watch: Watch, device: torch.device | None, texts: Mapping[int, str]
    ) -> tuple[Facts, Mapping[Pair, str]]:
        """The facts of all ranks, and the pairs that cannot read each other's memory."""
        facts = {rank: _read(text) for rank, text in texts.items()}
        digest = hashlib.blake2b(repr(sorted(texts.items())).encode(), digest_size=12).hexdigest()
        if digest not in self._known:
            mine = {str(peer): self._try(peer, device, facts[peer]) for peer in facts}
            keys = await_all(
                watch, f"gpus/{digest}", lambda peer: "it to try GPU memory", value=json.dumps(mine)
            )
            client, ranks = watch.connections.client, watch.connections.ranks
            values = client.request(lambda store: store.multi_get(keys))
            tried = {rank: _read(value) for rank, value in zip(ranks, values, strict=True)}
            self._known[digest] = {
                (one, other): str(reason)
                for one, other in combinations(sorted(facts), 2)
                if (reason := tried[one].get(str(other)) or tried[other].get(str(one)))
            }
        return facts, self._known[digest]

    def _try(self, peer: int, device: torch.device | None, theirs: Mapping[str, Any]) -> str:
        """Why this rank cannot read the GPU memory of a peer; empty if it can, or need not."""
        connections, rank = self._connections, self._connections.rank
        if peer not in (rank, *connections.peers):
            return f"ranks {rank} and {peer} are on different hosts"
        if peer == rank or device is None or "gpu" not in theirs:
            return ""
        own = self._probes[device]
        for one, announced in ((rank, own), (peer, theirs)):
            if not announced.get("gpu"):
                return f"rank {one} cannot export GPU memory ({announced.get('error')})"
        memory = connections.resource(GpuMemory)
        try:
            with memory.using(device):
                address = memory.driver.open(bytes.fromhex(str(theirs["handle"])))
                try:
                    right = memory.driver.read_word(address) == theirs["word"]
                finally:
                    memory.driver.close(address)
        except (CudaError, RuntimeError, ValueError, KeyError) as error:
            return f"rank {rank} cannot map the GPU memory of rank {peer} ({error})"
        return "" if right else f"rank {rank} reads something else than rank {peer} has written"

    def close(self) -> None:
        memory = self._connections.resources.get(GpuMemory)
        while self._allocated and memory is not None:
            device, address = self._allocated.pop()
            with memory.using(device), contextlib.suppress(CudaError):
                memory.driver.free(address)


def find_routes(
    watch: Watch, option: str, plan: Plan, device: torch.device | None, texts: Mapping[int, str]
) -> GpuRoutes | None:
    """How data goes between GPUs, from what all ranks have announced; None: by way of the host.

    An announcement is where a rank has its tensors, and on a second line what `facts` returned.
    """
    forced = option in GPU_TRANSPORTS
    if option != "auto" and not forced:
        return None
    parts = {rank: text.partition("\n") for rank, text in texts.items()}
    places = {rank: part[0] for rank, part in parts.items()}
    if not all_on_gpus(places):
        for rank, place in places.items() if forced else ():
            if not all_on_gpus({0: place, 1: GPU}):
                text = f'transport="{option}" was forced and the tensors of rank {rank} are on'
                watch.fail(Cause("tensor", f"{text} {place}: move them to one GPU"))
        return None
    trials = watch.connections.resource(GpuTrials)
    announced = {rank: part[2] for rank, part in parts.items()}
    if not forced and any(_read(one).get("idle") is False for one in announced.values()):
        return None  # a rank has no tensors, and no GPU to take part in the handshake
    facts, why_not = trials.settle(watch, device, announced)
    ends = zip(plan.traffic.source.tolist(), plan.traffic.destination.tolist(), strict=True)
    pairs = {_pair(*pair) for pair in ends if pair[0] != pair[1]}
    routes = choose_routes(option, pairs, facts, why_not)
    if isinstance(routes, str):
        watch.fail(Cause("error", routes))
    return routes


def choose_routes(
    option: str, pairs: Collection[Pair], facts: Facts, why_not: Mapping[Pair, str]
) -> GpuRoutes | str:
    """How pairs that exchange something do it; or why the forced transport is impossible."""
    lacking = {pair: why_not[pair] for pair in sorted(pairs) if why_not.get(pair)}
    if option == "gpu_peer":
        for (one, other), reason in lacking.items():
            return (
                f'transport="gpu_peer" was forced and ranks {one} and {other} cannot use it: '
                f"{reason}"
            )
        return GpuRoutes({}, False, option)
    no_nccl = _no_nccl(facts)
    if option == "nccl":
        return f'transport="nccl" was forced: {no_nccl}' if no_nccl else GpuRoutes({}, True, option)
    return GpuRoutes(lacking, not no_nccl)


def _no_nccl(facts: Facts) -> str:
    """Why NCCL is impossible among all ranks; empty if it is not."""
    without = [rank for rank, one in facts.items() if not one.get("nccl")]
    if without:
        return f"the process group of rank {without[0]} has no NCCL for GPUs"
    seen: dict[tuple[str, str], int] = {}
    for rank, one in facts.items():
        if one.get("gpu"):
            other = seen.setdefault((one["gpu"], str(one.get("nccl host"))), rank)
            if other != rank:
                return f"ranks {other} and {rank} share a GPU, which NCCL refuses"
    return ""


def _pair(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)


def _read(text: str | bytes) -> dict[str, Any]:
    """Facts of a rank; none if they are malformed."""
    try:
        facts = json.loads(text)
        return facts if isinstance(facts, dict) else {}
    except ValueError:
        return {}
