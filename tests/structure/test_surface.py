"""The public names, pinned: a change here is a change for every user."""

import pytest

import reshard
from reshard.rules import models

PUBLIC = [
    "ArgumentError",
    "ArgumentTypeError",
    "Box",
    "BoxError",
    "CheckpointError",
    "CoverageError",
    "DamageError",
    "DisagreementError",
    "DtypeError",
    "FormatError",
    "Layout",
    "LayoutError",
    "LiveError",
    "MemoryCapError",
    "Mesh",
    "MeshError",
    "MoveTimeoutError",
    "NamesError",
    "NotationError",
    "OperationError",
    "PathError",
    "PeerLostError",
    "Plan",
    "PlanError",
    "ProofError",
    "ReshardError",
    "Rules",
    "RulesError",
    "RunReport",
    "SimulationReport",
    "SizeError",
    "StateError",
    "Summary",
    "TargetError",
    "TensorError",
    "TensorSpec",
    "Topology",
    "TopologyError",
    "UnfinishedError",
    "UnsupportedError",
    "backward",
    "check",
    "describe",
    "exchange",
    "flat_bucket",
    "join",
    "layout_of",
    "move",
    "plan",
    "simulate",
    "stack",
    "take",
]


def test_public_names() -> None:
    assert sorted(reshard.__all__) == sorted(PUBLIC)


def test_every_public_name_loads() -> None:
    pytest.importorskip("torch", reason="moves need torch")
    for name in reshard.__all__:
        assert getattr(reshard, name) is not None
    assert set(reshard.__all__) <= set(dir(reshard))


def test_moved_modules_warn_under_their_old_names() -> None:
    with pytest.warns(DeprecationWarning, match=r"reshard\.models is reshard\.rules\.models now"):
        assert reshard.models is models
