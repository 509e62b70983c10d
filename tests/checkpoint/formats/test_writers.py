"""The files of each format: names, headers, alignment, and archives that torch loads."""

from __future__ import annotations

import io
import pickle
import zipfile
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoint.formats.distcp_writer import distcp, pickled, tensor_archive
from reshard.checkpoint.formats.safetensors.writer import full, ranks, sharded
from reshard.checkpoint.formats.torch.archive import BIG
from reshard.checkpoint.output import Wanted
from reshard.errors import CheckpointError, CoverageError, LayoutError, TargetError
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 200), 1 << 200) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)
DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
    "bool", "complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn",
    "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip


@given(PLAIN)
def test_plain_values_unpickle(value: object) -> None:
    assert pickle.loads(pickled(value)) == value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 5)])
def test_torch_loads_an_archive(dtype: str, shape: tuple[int, ...]) -> None:
    head, tail = tensor_archive(dtype, shape)
    size = prod(shape) * getattr(torch, dtype).itemsize
    assert len(head) % 64 == 0
    data = bytes(1 if dtype == "bool" else 1 + at % 250 for at in range(size))
    file = io.BytesIO(head + data + tail)
    tensor = torch.load(file, weights_only=True)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.shape == shape
    assert tensor.flatten().view(torch.uint8).numpy().tobytes() == data
    assert {info.filename for info in zipfile.ZipFile(file).infolist()} >= {
        "archive/data.pkl", "archive/data/0", "archive/version",
    }  # fmt: skip


def test_archives_of_more_than_4_gib_have_64_bit_sizes() -> None:
    head, tail = tensor_archive("uint8", (BIG + 10,))
    assert b"\x01\x00\x10\x00" + (BIG + 10).to_bytes(8, "little") * 2 in head
    assert b"PK\x06\x06" in tail


def layouts(texts: dict[str, str], **axes: int) -> dict[str, Wanted]:
    mesh = Mesh(**axes)
    return {name: Wanted((8, 6), "float32", Layout(mesh, text)) for name, text in texts.items()}


def test_replicas_are_written_once_and_by_turns() -> None:
    wanted = layouts({f"w{i}": "- -" for i in range(4)}, dp=4)
    output = sharded(wanted, {}, "dp=4")
    assert [len(tensor.pieces) for tensor in output.tensors.values()] == [1] * 4
    assert sorted(t.pieces[0].file for t in output.tensors.values()) == [0, 1, 2, 3]


def test_several_boxes_of_a_rank_are_several_files() -> None:
    output = sharded(layouts({"w": "tp{4,4} -"}, tp=2), {}, "tp=2")
    assert [file.path for file in output.files] == [
        f"shard-0000{rank}-model-0000{part}-of-00002.safetensors"
        for rank in (1, 2)
        for part in (1, 2)
    ]
    many = {"w": Wanted((1000,), "uint8", Layout(Mesh(tp=2), "tp:1"))}
    with pytest.raises(TargetError, match="separate boxes"):
        sharded(many, {}, "tp=2")


def test_files_of_ranks_hold_local_tensors() -> None:
    output = ranks(layouts({"w": "tp{4,4} -", "n": "- -"}, tp=2), {})
    assert [file.path for file in output.files] == [
        "model-rank-0-part-0.safetensors",
        "model-rank-1-part-0.safetensors",
    ]
    assert [piece.file for piece in output.tensors["w"].pieces] == [0, 0, 1, 1]
    assert [piece.file for piece in output.tensors["n"].pieces] == [0, 1]


def test_wide_elements_come_first() -> None:
    wanted = {"a": Wanted((3,), "uint8"), "b": Wanted((2,), "float64"), "c": Wanted((1,), "int16")}
    output = full(wanted, {"format": "pt"}, 10**9)
    starts = {name: tensor.pieces[0].offset for name, tensor in output.tensors.items()}
    assert starts["b"] < starts["c"] < starts["a"]
    assert starts["b"] % 8 == 0


def test_what_a_layout_would_lose_is_an_error() -> None:
    from reshard.layout.box import Box

    boxes = Layout.from_boxes((8, 6), {0: [Box((0, 0), (8, 3))]})
    wanted = {"w": Wanted((8, 6), "float32", boxes)}
    with pytest.raises(CoverageError, match="24 of the 48"):
        sharded(wanted, {}, None)
    with pytest.raises(CoverageError, match="24 of the 48"):
        distcp(wanted)
    with pytest.raises(LayoutError, match="one mesh"):
        ranks(wanted, {})
    with pytest.raises(CheckpointError, match="complex128"):
        full({"w": Wanted((8,), "complex128")}, {}, 10**9)
