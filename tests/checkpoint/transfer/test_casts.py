"""Casts equal torch's bit by bit, for every dtype that both have."""

import numpy as np
import pytest
import torch

from reshard.dtypes import cast_into, check_cast
from reshard.errors import DtypeError

FLOATS = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
EDGES = [0.0, -0.0, 448, 449, 464, 465, 480, -464, 57344, 61439, 61440, 240, 248, 65504, 1e30]


def values() -> torch.Tensor:
    torch.manual_seed(0)
    scales = [torch.randn(20000) * 10.0**power for power in range(-9, 7)]
    return torch.cat([*scales, torch.tensor(EDGES), torch.tensor([float("inf"), -float("inf")])])


@pytest.mark.parametrize("want", FLOATS)
@pytest.mark.parametrize("have", FLOATS)
def test_a_cast_is_torchs(have: str, want: str) -> None:
    source = values().to(getattr(torch, have))
    expected = source.to(getattr(torch, want))
    given = source.view(torch.uint8).numpy().view(f"u{source.element_size()}")
    found = np.empty(len(given), dtype=f"u{expected.element_size()}")
    cast_into(given, have, found, want)
    result = torch.from_numpy(found.view(np.uint8)).view(expected.dtype)
    same = (result.view(torch.uint8) == expected.view(torch.uint8)).reshape(len(given), -1).all(1)
    both_nan = result.double().isnan() & expected.double().isnan()
    wrong = torch.nonzero(~(same | both_nan)).flatten()
    assert not len(wrong), [(source[i].item(), expected[i].item()) for i in wrong[:5]]


@pytest.mark.parametrize(
    ("have", "want"), [("int64", "float32"), ("int32", "int64"), ("bool", "int8")]
)
def test_whole_numbers_are_cast_too(have: str, want: str) -> None:
    source = torch.tensor([0, 1, 1, 0]).to(getattr(torch, have))
    found = np.empty(4, dtype=f"u{getattr(torch, want).itemsize}")
    cast_into(source.numpy().view(f"u{source.element_size()}"), have, found, want)
    assert found.tobytes() == source.to(getattr(torch, want)).numpy().tobytes()


@pytest.mark.parametrize(("have", "want"), [("complex64", "float32"), ("float32", "complex32")])
def test_casts_that_mean_nothing_are_refused(have: str, want: str) -> None:
    with pytest.raises(DtypeError, match="cannot be cast"):
        check_cast(have, want)
