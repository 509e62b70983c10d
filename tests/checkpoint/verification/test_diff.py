"""diff reports what two checkpoints have in common, and how the rest differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from reshard.checkpoint import convert, diff, verify
from reshard.checkpoint.differences import between
from reshard.cli import run
from reshard.errors import CheckpointError, DamageError
from reshard.layout.box import Box
from tests.checkpoint.making import disjoint_boxes, header, random_array, write_sharded
from tests.soak import cases

W = ("float32", np.arange(12, dtype=np.float32).reshape(4, 3).view(np.uint32))
ROWS = [Box((0, 0), (2, 3)), Box((2, 0), (4, 3))]
COLUMNS = [Box((0, 0), (4, 1)), Box((0, 1), (4, 3))]
WHOLE = [Box((0, 0), (4, 3))]


def floats(values: np.ndarray) -> tuple[str, np.ndarray]:
    return "float32", np.asarray(values, np.float32).view(np.uint32)


def test_the_same_cut_differently(tmp_path: Path) -> None:
    write_sharded(tmp_path / "a", {"w": W}, {"w": ROWS})
    write_sharded(tmp_path / "b", {"w": W}, {"w": COLUMNS})
    report = diff(tmp_path / "a", tmp_path / "b")
    assert report.equal
    assert report.recut
    assert str(report).endswith("same values, different layouts (1 of 1 tensors)")
    alike = diff(tmp_path / "a", tmp_path / "a")
    assert alike.equal
    assert not alike.recut
    assert str(alike).endswith("same values, same layouts (1 tensor)")


def test_names_shapes_dtypes_and_values(tmp_path: Path) -> None:
    one = {"w": W, "gone": W, "shape": W, "dtype": W, "same": W}
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    values[1, 2] += 0.5
    values[3, 0] = -4
    two = {
        "w": floats(values),
        "new": W,
        "shape": ("float32", W[1].reshape(3, 4)),
        "dtype": ("int32", W[1]),
        "same": W,
    }
    write_sharded(tmp_path / "a", one, dict.fromkeys(one, WHOLE))
    write_sharded(
        tmp_path / "b", two, {**dict.fromkeys(two, WHOLE), "shape": [Box((0, 0), (3, 4))]}
    )
    report = diff(tmp_path / "a", tmp_path / "b")
    assert not report.equal
    assert report.only == (("gone",), ("new",))
    assert report.num_equal == 1
    found = {each.name: each for each in report.changed}
    assert set(found) == {"w", "shape", "dtype"}
    assert found["shape"].shapes == ((4, 3), (3, 4))
    assert found["dtype"].dtypes == ("float32", "int32")
    changed = found["w"]
    assert (changed.count, changed.first, changed.largest) == (2, (1, 2), 13.0)
    assert changed.box == Box((1, 0), (4, 3))
    text = str(report)
    assert "w: 2 elements differ, by at most 13, all within [1:4, 0:3], the first at (1, 2)" in text
    data = json.loads(report.to_json())
    assert data["changed"][0]["places"][0]["file"].endswith(".safetensors")


@settings(max_examples=cases(15, 500), deadline=None)
@given(st.data())
def test_counts_and_places_are_those_of_numpy(data: st.DataObject) -> None:
    """Whatever the two cuts, and with windows of a few elements."""
    shape = data.draw(st.sampled_from([(), (9,), (6, 5), (4, 3, 5)]))
    ours = random_array("bfloat16", shape, 1)
    flags = np.random.default_rng(data.draw(st.integers(0, 99))).random(shape) < 0.2
    theirs = np.where(flags, ours ^ 1, ours).astype(np.uint16)
    with TemporaryDirectory() as folder:
        for name, array in (("a", ours), ("b", theirs)):
            boxes = [box for box in data.draw(disjoint_boxes(shape)) if box.size]
            write_sharded(Path(folder, name), {"w": ("bfloat16", array)}, {"w": boxes})
        report = diff(Path(folder, "a"), Path(folder, "b"), memory="1MiB")
    assert report.equal == (not flags.any())
    for each in report.changed:
        at = np.argwhere(flags)
        assert each.count == len(at)
        assert each.first == tuple(at[0].tolist())
        assert each.box == Box(tuple(at.min(axis=0).tolist()), tuple((at.max(axis=0) + 1).tolist()))


@pytest.mark.parametrize(
    ("dtype", "one", "two", "largest"),
    [
        ("int64", [-(2**63), 5], [2**63 - 1, 5], 2**64 - 1),
        ("uint8", [3, 255], [250, 255], 247),
        ("bool", [True, False], [True, True], 1),
        ("float32", [1.0, np.inf], [2.5, -np.inf], np.inf),
        ("float32", [0.0, 1.0], [-0.0, 1.0], 0.0),
        ("float32", [np.nan, 1.0], [3.0, 1.5], 0.5),
        ("float64", [np.nan], [3.0], None),
        ("complex64", [3 + 4j], [0], 5.0),
    ],
)
def test_how_far_apart(dtype: str, one: list, two: list, largest: float | None) -> None:
    left, right = (np.array(values, dtype=dtype) for values in (one, two))
    word = f"u{left.itemsize}"
    found = between(left.view(word), right.view(word), (dtype, dtype), Box.whole(left.shape))
    assert found is not None
    assert found.largest == largest


def test_other_dtypes_are_compared_as_numbers(tmp_path: Path) -> None:
    values = np.array([1.0, 2.5, np.nan, np.inf, -0.0, 1.001], np.float32)
    rounded = (values.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16 is the upper half
    exact = values.astype(np.float64).view(np.uint64)
    whole = {"w": [Box((0,), (6,))]}
    write_sharded(tmp_path / "a", {"w": floats(values)}, whole)
    write_sharded(tmp_path / "b", {"w": ("bfloat16", rounded)}, whole)
    write_sharded(tmp_path / "c", {"w": ("float64", exact)}, whole)
    (found,) = diff(tmp_path / "a", tmp_path / "b").changed
    assert (found.count, found.first) == (1, (5,))
    assert found.largest == pytest.approx(0.001, rel=1e-3)
    assert "dtype float32 and bfloat16, numbers differ, by at most 0.001" in str(found)
    report = diff(tmp_path / "a", tmp_path / "c")
    assert not report.equal
    assert str(report.changed[0]) == "w: dtype float32 and float64, the same numbers"


def test_integers_of_two_dtypes_are_compared_exactly(tmp_path: Path) -> None:
    """Beyond 2**53 neighbours are one float64; and the distance may not fit into 64 bits."""
    signed = np.array([2**53, -5, 7, -(2**63)], np.int64)
    unsigned = np.array([2**53 + 1, 5, 7, 2**64 - 1], np.uint64)
    word = {"w": [Box((0,), (4,))]}
    write_sharded(tmp_path / "a", {"w": ("int64", signed)}, word)
    save_file({"w": unsigned}, tmp_path / "b.safetensors")
    (found,) = diff(tmp_path / "a", tmp_path / "b.safetensors").changed
    assert (found.count, found.largest) == (3, 2**64 - 1 + 2**63)
    near = np.array([2**53, 5], np.int64), np.array([2**53 + 1, 5], np.uint64)
    one = between(near[0], near[1], ("int64", "uint64"), Box((0,), (2,)))
    assert one is not None
    assert (one.count, one.first, one.largest) == (1, (0,), 1)


def test_strange_names_stay_on_one_line(tmp_path: Path) -> None:
    write_sharded(tmp_path / "a", {"a\nb": W, "w": W}, {"a\nb": WHOLE, "w": WHOLE})
    write_sharded(tmp_path / "b", {"\ud800": W, "w": W}, {"\ud800": WHOLE, "w": WHOLE})
    lines = str(diff(tmp_path / "a", tmp_path / "b")).splitlines()
    assert "  a\\nb" in lines
    assert "  \\ud800" in lines


def test_equal_bits_are_no_difference_even_of_nans() -> None:
    nan = np.full(3, np.nan, np.float64).view(np.uint64)
    assert between(nan, nan.copy(), ("float64", "float64"), Box((0,), (3,))) is None


def test_damage_is_an_error(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_sharded(tmp_path / name, {"w": W}, {"w": ROWS}, checksums=64)
    path = next((tmp_path / "b").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamageError, match="changed since they were written"):
        diff(tmp_path / "a", tmp_path / "b")
    path.unlink()
    with pytest.raises((CheckpointError, ValueError)):
        diff(tmp_path / "a", tmp_path / "b")


def test_replicas_that_disagree_are_an_error(tmp_path: Path) -> None:
    write_sharded(tmp_path / "a", {"w": W}, {"w": WHOLE})
    write_sharded(tmp_path / "b", {"w": W}, {"w": [*WHOLE, *WHOLE]})
    assert diff(tmp_path / "a", tmp_path / "b").equal
    path = max((tmp_path / "b").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamageError, match="should hold the same and 1 elements differ"):
        diff(tmp_path / "a", tmp_path / "b")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_entries_that_are_no_tensors(tmp_path: Path) -> None:
    """Two .distcp folders with another step counter, written by torch itself."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    torch = pytest.importorskip("torch")
    for name, step in (("a", 7), ("b", 8), ("c", 7)):
        dcp.save({"w": torch.arange(6.0), "step": step}, checkpoint_id=str(tmp_path / name))
    assert diff(tmp_path / "a", tmp_path / "c").equal
    report = diff(tmp_path / "a", tmp_path / "b")
    assert report.objects == ("step",)
    assert not report.equal


@pytest.mark.parametrize("kinds", [("pt", "pt"), ("pt", "distcp"), ("full", "full")])
def test_plain_values_are_compared(tmp_path: Path, kinds: tuple[str, str]) -> None:
    torch = pytest.importorskip("torch")
    for name, step in (("a", 7), ("b", 8)):
        file = tmp_path / f"{name}.pt"
        torch.save({"w": torch.ones(2), "step": step, "lr": (0.1, float("nan")), "raw": b"x"}, file)
        for kind in {*kinds} - {"pt"}:
            convert(file, tmp_path / f"{name}.{kind}", format=kind)
    one, two = kinds
    a, b, c = (tmp_path / name for name in (f"a.{one}", f"a.{two}", f"b.{two}"))
    assert diff(a, b).equal
    assert verify(a, b)
    assert ("raw" in str(diff(a, b).notes)) == (one != two)
    assert diff(a, c).objects == ("step",)
    [problem] = verify(a, c).problems
    assert problem.kind == "object"
    assert "7 in" in problem.message.replace(chr(34), "")


def test_a_note_names_entries_that_one_kind_cannot_hold(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2), "raw": b"x"}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b")
    for report in (
        diff(tmp_path / "a.pt", tmp_path / "b"),
        verify(tmp_path / "a.pt", tmp_path / "b"),
    ):
        assert report.notes == (
            'not compared, as no tensors and not plain values on both sides: "raw"',
        )
        assert "not compared" in str(report)


MEASURE = """
import sys
def status(field):
    return int(next(line for line in open("/proc/self/status") if field in line).split()[1])
import numpy, xxhash
from reshard.checkpoint.differences import diff
import reshard.checkpoint.formats.safetensors.reader
before = status("VmRSS")
report = diff(*sys.argv[1:], memory="32MiB")
assert report.changed[0].count == 64 << 20, str(report)
assert report.changed[0].largest == 1
print(status("VmHWM") - before)
"""


def test_memory_stays_under_the_cap_where_everything_differs(tmp_path: Path) -> None:
    size = 64 << 20
    for name in "ab":
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.write(header({"w": ("U8", (size // 4, 4), size)}, {}))
            at = file.tell()
            file.truncate(at + size)
            for _ in range(64 if name == "b" else 0):
                file.write(bytes([1]) * (1 << 20))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "a"), str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert 1024 < int(done.stdout) < 32 * 1024


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, boxes in (("a", ROWS), ("b", COLUMNS)):
        write_sharded(tmp_path / name, {"w": W}, {"w": boxes})
    other = floats(np.ones((4, 3)))
    write_sharded(tmp_path / "c", {"w": other}, {"w": WHOLE})
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert run(["diff", a, b]) == 0
    assert "different layouts" in capsys.readouterr().out
    assert run(["diff", a, c, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["equal"] is False
    assert run(["diff", a, str(tmp_path / "absent")]) == 2
    assert "does not exist" in capsys.readouterr().err
