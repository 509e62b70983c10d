"""Names in ``load`` and ``save``: tied, misspelt, missing on a rank, without the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from reshard import checkpoint, sharded
from reshard.checkpoint.live.saving import _check_present
from reshard.errors import CheckpointError, DisagreementError, NamesError
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.layout.spec import TensorSpec
from tests.ranks.meshes import mesh_of
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group


class Tied(nn.Module):
    """A language model in which the embedding is the head."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tie:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_a_tied_model_is_loaded_whichever_name_was_saved(tmp_path: Path, kept: str) -> None:
    saved = torch.randn(6, 4)
    save_file({kept: saved}, tmp_path / "model.safetensors")
    model = Tied()
    report = checkpoint.load(tmp_path, into=model.state_dict())
    assert torch.equal(model.head.weight, saved)
    assert torch.equal(model.embed.weight, saved)
    assert {kept, *report.tied} == {"embed.weight", "head.weight"}
    assert report.num_tensors == 1
    assert not report.missing
    assert not report.unexpected
    assert f"tied     {report.tied[0]}" in str(report)
    with pytest.raises(NamesError, match="lacks"):
        checkpoint.load(tmp_path, into=Tied(tie=False).state_dict())


def test_a_tied_model_as_the_safetensors_library_saves_it(tmp_path: Path) -> None:
    one, two = Tied(), Tied()
    save_model(one, str(tmp_path / "model.safetensors"))
    checkpoint.load(tmp_path, into=two.state_dict(), strict="exact")
    assert torch.equal(one.embed.weight, two.head.weight)


def test_names_of_one_storage_are_not_tied_where_they_are_other_elements(tmp_path: Path) -> None:
    both = torch.zeros(8)
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    for view in (both[4:], both.view(2, 4), both[:4].view(torch.int32), both[::2]):
        with pytest.raises(NamesError, match='lacks "b"'):
            checkpoint.load(tmp_path, into={"a": both[:4], "b": view})
    assert not both.any()


def trained(path: Path) -> nn.Module:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return model


def test_a_model_is_loaded_without_its_optimizer(tmp_path: Path) -> None:
    saved, model = trained(tmp_path / "last.pt"), nn.Linear(3, 2)
    report = checkpoint.load(tmp_path / "last.pt", into={"model": model.state_dict()})
    assert torch.equal(model.weight, saved.weight)
    assert len(report.unexpected) == 6
    assert all(name.startswith("optimizer.state.") for name in report.unexpected)
    with pytest.raises(NamesError, match=r'holds "optimizer\.state.* and 1 more, which the state'):
        checkpoint.load(tmp_path / "last.pt", into={"model": model.state_dict()}, strict="exact")


@pytest.mark.parametrize("strict", [True, False, "exact"])
@pytest.mark.parametrize("name", ["model.wieght", "model.weigth", "model.weigh", "model.weights"])
def test_a_misspelt_name_is_always_an_error(tmp_path: Path, strict: Any, name: str) -> None:
    trained(tmp_path / "last.pt")
    into = {name: torch.full((2, 3), -1.0), "model.bias": torch.full((2,), -1.0)}
    said = rf'lacks "{name}" \("model.weight" is near\): rename'
    with pytest.raises(NamesError, match=said):
        checkpoint.load(tmp_path / "last.pt", into=into, strict=strict)
    assert all((tensor == -1).all() for tensor in into.values())


def test_what_is_really_missing_may_be(tmp_path: Path) -> None:
    """Other layers and other short names are no typing errors."""
    names = ("layers.0.q.weight", "layers.1.k.weight", "w1", "abc")
    save_file({name: torch.ones(2) for name in names}, tmp_path / "model.safetensors")
    absent = ("layers.1.q.weight", "layers.2.q.weight", "w2", "abd", "lora.weight")
    into = {"layers.0.q.weight": torch.zeros(2)} | {name: torch.zeros(2) for name in absent}
    report = checkpoint.load(tmp_path, into=into, strict=False)
    assert report.missing == tuple(sorted(absent))
    assert set(report.unexpected) == {"layers.1.k.weight", "w1", "abc"}
    with pytest.raises(NamesError, match=r'lacks "layers.1.q.weight".*: strict=False'):
        checkpoint.load(tmp_path, into=into)
    with pytest.raises(CheckpointError, match='use True, False or "exact"'):
        checkpoint.load(tmp_path, into=into, strict="both")  # type: ignore[arg-type]


def test_the_nearest_name_may_have_another_prefix(tmp_path: Path) -> None:
    save_file({f"model.layers.{i}.w": torch.ones(1) for i in range(9)}, tmp_path / "a.safetensors")
    with pytest.raises(NamesError, match=r'lacks "layers.7.w" \("model.layers.7.w" is near\)'):
        checkpoint.load(tmp_path, into={"layers.7.w": torch.zeros(1)})


def store(how: str, state: dict[str, torch.Tensor], folder: Path) -> Path:
    if how == "digests":
        checkpoint.save(state, folder)
        return folder
    folder.mkdir()
    if how == "torch.save":
        torch.save(state, folder / "a.pt")
    else:
        save_file(
            {name: tensor.clone() for name, tensor in state.items()}, folder / "a.safetensors"
        )
    return folder


def test_names_of_tied_tensors_are_reported_in_order(tmp_path: Path) -> None:
    """Those that the checkpoint has, and those that it lacks, as other names are."""
    b, d = torch.zeros(2), torch.zeros(3)
    into = {"b": b, "d": d, "e": d, "c": b, "a": d}
    stored = {"d": torch.ones(3), "e": torch.ones(3), "c": torch.ones(2)}
    save_file(stored, tmp_path / "model.safetensors")
    assert checkpoint.load(tmp_path, into=into).tied == ("a", "b", "e")


@pytest.mark.parametrize(("how", "reads"), [("torch.save", 1), ("copies", 2), ("digests", 1)])
def test_both_names_in_the_checkpoint_must_hold_the_same(
    tmp_path: Path, how: str, reads: int
) -> None:
    model, saved = Tied(), Tied().state_dict()
    report = checkpoint.load(store(how, saved, tmp_path / "same"), into=model.state_dict())
    assert torch.equal(model.embed.weight, saved["embed.weight"])
    assert report.tied == ("head.weight",)
    assert report.bytes_read == reads * 6 * 4 * 4
    other = {"embed.weight": torch.ones(6, 4), "head.weight": torch.zeros(6, 4)}
    with pytest.raises(CheckpointError, match="differ"):
        checkpoint.load(store(how, other, tmp_path / "other"), into=model.state_dict())
    assert torch.equal(model.embed.weight, saved["embed.weight"])


def load_tied(rank: int, path: str, tie_on: tuple[int, ...]) -> str:
    """Three rows on four ranks: the last one has none."""
    mesh = mesh_of(4)
    zeros = distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)], src_data_rank=None)
    other = DTensor.from_local(
        zeros.to_local() if rank in tie_on else zeros.to_local().clone(), mesh, [Shard(0)],
        run_check=False, shape=zeros.shape, stride=zeros.stride(),
    )  # fmt: skip
    try:
        report = checkpoint.load(path, into={"a": zeros, "b": other}, group=pool_group(4))
    except (NamesError, DisagreementError) as error:
        return str(error)
    assert (other.to_local() == torch.arange(6.0).reshape(3, 2)[rank : rank + 1]).all()
    return ", ".join(report.tied)


def test_tied_on_all_ranks_that_hold_elements(pool: Pool, tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0).reshape(3, 2)}, tmp_path / "model.safetensors")
    args = (str(tmp_path),)
    assert set(pool.run(load_tied, *args, (0, 1, 2), ranks=range(4))) == {"b"}
    [said] = set(pool.run(load_tied, *args, (0, 2), ranks=range(4)))
    assert 'lacks "b"' in said
    save_file({"a": torch.zeros(3, 2), "b": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    [said] = set(pool.run(load_tied, *args, (0, 2), ranks=range(4)))
    assert "one memory on some ranks and two on rank 1" in said


def save_without(rank: int, path: str, layout: str) -> str:
    """Save a tensor that rank 1 has forgotten."""
    spec = sharded.LayoutShardingSpec(Layout(Mesh(r=4), layout))
    cut = sharded.ones(spec, 8, 2, process_group=pool_group(4))
    state = {"p": torch.ones(3)} if rank == 1 else {"d": cut, "p": torch.ones(3)}
    try:
        checkpoint.save(state, path, group=pool_group(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("layout", ["r -", "- -"])
def test_a_tensor_that_one_rank_lacks(pool: Pool, tmp_path: Path, layout: str) -> None:
    told = pool.run(save_without, str(tmp_path / "a"), layout, ranks=range(4))
    assert len(set(told)) == 1, told
    assert 'rank 1 has no tensor "d", which is sharded over it' in told[0]
    assert not [*tmp_path.iterdir()]


def test_the_first_rank_that_lacks_a_tensor_is_named() -> None:
    spec = TensorSpec((16,), "float32", Layout(Mesh(r=16), "r"))
    answers = {rank: {} if rank in (1, 8) else {"d": spec} for rank in range(16)}
    with pytest.raises(DisagreementError, match='rank 1 has no tensor "d", which is sharded'):
        _check_present({"d": spec}, answers)
