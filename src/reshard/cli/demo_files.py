"""The last part of ``reshard demo``: a small checkpoint on disk, cut four ways, then two."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

__all__ = ["Converted", "convert_files"]

MODEL = "llama-3.2-1b"
SMALLER = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": 4}
"""By how much the model that is written is smaller than the real one."""
HAVE, WANT = "tp=4", "tp=2"


@dataclass(frozen=True, slots=True)
class Converted:
    """A checkpoint that was cut another way, and whether it still holds the same."""

    found: str
    """What ``inspect`` says of the source."""
    made: str
    bytes_read: int
    bytes_written: int
    amplification: float
    seconds: float
    verify_seconds: float
    equal: bool

    @property
    def holds(self) -> bool:
        """Whether all values are the same, and each was read once."""
        return self.equal and self.amplification <= 1.02

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        return asdict(self)


def convert_files() -> Converted:
    """Write a small model cut four ways into a temporary folder, cut it two ways, and compare."""
    from reshard.checkpoint.conversion.request import convert
    from reshard.checkpoint.inspection.inspecting import inspect
    from reshard.checkpoint.verification.soundness import verify

    with TemporaryDirectory(prefix="reshard-demo-") as folder:
        whole, four, two = (Path(folder) / name for name in ("ckpt", "ckpt-tp4", "ckpt-tp2"))
        _write_model(whole)
        convert(whole, four, mesh=HAVE, rules="llama")
        start = time.perf_counter()
        report = convert(four, two, mesh=WANT, rules="llama")
        converted = time.perf_counter()
        equal = verify(four, two).ok
        verified = time.perf_counter()
        found, made = (_summary(inspect(path), folder) for path in (four, two))
    return Converted(
        found,
        made,
        report.bytes_read,
        report.bytes_written,
        report.amplification,
        converted - start,
        verified - converted,
        equal,
    )


def _summary(inspection: object, folder: str) -> str:
    return str(inspection).splitlines()[0].replace(f"{folder}/", "")


def _write_model(folder: Path) -> None:
    """A model of random values as Hugging Face has it: one file and a config."""
    import numpy as np

    from reshard.checkpoint.formats.safetensors.header import build_header
    from reshard.rules.models import preset, tensors

    config: Mapping[str, Any] = {
        key: value // SMALLER.get(key, 1) if key in SMALLER else value
        for key, value in preset(MODEL).items()
    }
    model = tensors(config)
    header = build_header({name: (dtype, shape) for name, (shape, dtype) in model.items()})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(config)))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header.data)
        file.write(np.random.default_rng(0).bytes(header.file_size - len(header.data)))
