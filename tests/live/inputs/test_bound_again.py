"""Tensors of a later call are checked as those of the first one, whatever changed in between."""

import re
from collections.abc import Callable

import pytest
import torch

import reshard as rs
from reshard.live.inputs import bound as bound_module
from reshard.live.inputs.bound import BoundTensors, Locals

SHAPE = (3, 4)
Change = Callable[[dict[str, torch.Tensor]], object]


def plan_of(*names: str, dtype: str = "float32") -> rs.Plan:
    mesh = rs.Mesh(tp=2)
    specs = [rs.TensorSpec((6, 4), dtype, rs.Layout(mesh, text)) for text in ("tp -", "- tp")]
    return rs.plan(*(dict.fromkeys(names, spec) for spec in specs))


def given(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.randn(SHAPE).to(dtype) for name in ("a", "b", "c")}


def bound_to(local: Locals, tensors: dict[str, torch.Tensor | None]) -> BoundTensors:
    bound = BoundTensors(local.staging)
    bound.bind(local.sides[0], tensors)
    return bound


def facts(bound: BoundTensors) -> list[object]:
    return [*bound.identity, bound.devices, {n: id(one) for n, one in bound.tensors.items()}]


def test_a_later_call_binds_what_a_first_call_binds() -> None:
    plan = plan_of("a", "b", "c")
    local = Locals(plan, 0)
    bound_to(local, given())
    strided = given() | {"b": torch.randn(4, 3).t()}
    moved = {name: one.clone() for name, one in given().items()}
    parts = dict(zip("abc", torch.randn(9, 4).split(3), strict=True))
    parameters = {name: torch.nn.Parameter(one) for name, one in given().items()}
    for tensors in (given(), strided, strided, moved, dict(reversed(moved.items())), parts):
        assert facts(bound_to(local, tensors)) == facts(bound_to(Locals(plan, 0), tensors))
    for tensors in (parameters, given(), parameters):
        assert facts(bound_to(local, tensors)) == facts(bound_to(Locals(plan, 0), tensors))
    with torch.inference_mode():
        assert facts(bound_to(local, moved)) == facts(bound_to(Locals(plan, 0), moved))


def _free_around(tensors: dict[str, torch.Tensor]) -> None:
    """The address of a part of a freed storage is not 0."""
    whole = torch.randn(8, 4)
    tensors["b"] = whole[5:]
    whole.untyped_storage().resize_(0)


CHANGES: dict[str, tuple[Change, str]] = {
    "other memory": (lambda t: setattr(t["b"], "data", torch.randn(SHAPE)), ""),
    "other strides": (lambda t: setattr(t["b"], "data", torch.randn(4, 3).t()), ""),
    "other dtype": (lambda t: setattr(t["b"], "data", t["b"].to(torch.int32)), "torch.int32"),
    "transposed": (lambda t: t["b"].t_(), "[4, 3]"),
    "resized": (lambda t: t["b"].resize_(2, 2), "[2, 2]"),
    "negative": (lambda t: t.update(b=torch._neg_view(t["b"])), "lazy conjugate or negative"),
    "sparse": (lambda t: t.update(b=t["b"].to_sparse()), "sparse"),
    "nested": (lambda t: t.update(b=torch.nested.nested_tensor([*t["b"]])), "nested tensor"),
    "freed": (lambda t: t["b"].untyped_storage().resize_(0), "its storage was freed"),
    "part of freed": (_free_around, "its storage was freed"),
    "on no device": (lambda t: t.update(b=t["b"].to("meta")), "meta"),
    "a number": (lambda t: t.update(b=3), "is a int"),
    "none": (lambda t: t.update(b=None), "was given none"),
    "left out": (lambda t: t.pop("b"), "was given none"),
    "one too many": (lambda t: t.update(d=t["b"]), "does not have"),
    "another name": (lambda t: t.update(d=t.pop("b")), "does not have"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_calls_is_noticed(change: str) -> None:
    """The same tensors first, so that they are known; then one of them is another one."""
    plan = plan_of("a", "b", "c")
    local, tensors = Locals(plan, 0), given()
    before = [facts(bound_to(local, tensors)) for _ in range(3)]
    assert before[0] == before[1] == before[2]
    apply, error = CHANGES[change]
    apply(tensors)
    if error:
        with pytest.raises(rs.TensorError, match=re.escape(error)):
            bound_to(local, tensors)
        return
    after = facts(bound_to(local, tensors))
    assert after == facts(bound_to(Locals(plan, 0), tensors))
    assert after[:2] != before[0][:2]


def test_a_lazy_conjugate_is_noticed_in_a_later_call() -> None:
    local, tensors = Locals(plan_of("a", "b", "c", dtype="complex64"), 0), given(torch.complex64)
    bound_to(local, tensors)
    bound_to(local, tensors)
    with pytest.raises(rs.TensorError, match="lazy conjugate"):
        bound_to(local, tensors | {"c": tensors["c"].conj()})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex128"])
def test_new_tensors_are_those_of_torch_empty(dtype: str) -> None:
    local = Locals(plan_of("a", dtype=dtype), 1)
    for inference in (False, True):
        with torch.inference_mode(inference):
            for near in (None, {}, {"a": torch.empty(1)}, {"a": None}):
                bound = BoundTensors(local.staging)
                bound.create(local.sides[1], torch.device("cpu"), near)
                new, like = bound.result["a"], torch.empty((6, 2), dtype=getattr(torch, dtype))
                for one in ("shape", "dtype", "device", "requires_grad", "is_leaf", "nbytes"):
                    assert getattr(new, one) == getattr(like, one), one
                assert new.stride() == like.stride()
                assert new.is_inference() == like.is_inference() == inference
                assert new.untyped_storage().nbytes() == like.untyped_storage().nbytes()
                assert new.untyped_storage().resizable()
                assert bound.is_host
                assert bound.devices == set()


def test_new_tensors_without_elements() -> None:
    mesh = rs.Mesh(tp=2)
    spec = rs.TensorSpec((1, 0, 5), "float32", rs.Layout(mesh, "tp - -"))
    plan = rs.plan({"a": spec}, {"a": spec})
    for rank in (0, 1):
        local = Locals(plan, rank)
        bound = BoundTensors(local.staging)
        bound.create(local.sides[1], torch.device("cpu"))
        assert [*bound.result] == ["a"]
        for one in bound.result.values():
            assert one.stride() == torch.empty(one.shape).stride()


@pytest.mark.parametrize("guards", [None, object()], ids=["no module", "no functions"])
def test_a_torch_without_what_compiled_code_uses(
    guards: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are private to torch; without them every tensor is checked and allocated as usual."""
    monkeypatch.setattr(bound_module, "guards", guards)
    plan, tensors = plan_of("a", "b", "c"), given()
    local = Locals(plan, 0)
    assert facts(bound_to(local, tensors)) == facts(bound_to(local, tensors))
    assert local.sides[0].accepted is None
    bound = BoundTensors(local.staging)
    bound.create(local.sides[1], torch.device("cpu"))
    assert [(one.shape, one.stride()) for one in bound.result.values()] == [((6, 2), (2, 1))] * 3
