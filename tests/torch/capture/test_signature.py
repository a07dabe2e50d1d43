"""A quantized network is called as its model was, and says which calls it cannot follow."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from quark.errors import InvalidValueError, ModelError
from quark.torch import ModelQuantizer, export_for_training
from quark.torch.capture import Batches, capture, read_batch, signature_of
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype

INT8 = QuantizationSpec(Dtype.int8)
QUANTIZER = ModelQuantizer(Config(QuantizationConfig(INT8, INT8, INT8)))
X, MASK, Y = torch.rand(4, 6), torch.ones(4, 6), torch.tensor([0, 1, 0, 1])


@dataclass
class Result:
    hidden: torch.Tensor
    total: torch.Tensor


class Masked(nn.Module):
    def __init__(self, kind: str = "tuple") -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.kind = kind

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        shift: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> Any:
        hidden = self.layer(x) * scale
        hidden = hidden if mask is None else hidden * mask
        hidden = hidden if shift is None else hidden + shift
        total = hidden.sum(1)
        return {"tuple": (hidden, total), "dict": {"hidden": hidden, "total": total}, "class": Result(hidden, total)}[
            self.kind
        ]


def test_optional_inputs_are_kept_and_called_as_before() -> None:
    model, shift = Masked(), torch.rand(4, 6)
    network = QUANTIZER.quantize_model(model, [{"x": X, "mask": MASK, "shift": shift}] * 2)
    assert list(inspect.signature(network.forward).parameters) == ["x", "mask", "shift", "scale"]
    expected = network(X, MASK * 0.5, shift=shift)
    for other in (network(x=X, mask=MASK * 0.5, shift=shift), network(X, shift=shift, mask=MASK * 0.5, scale=1.0)):
        assert torch.equal(other[0], expected[0])
    assert (expected[0] - model(X, MASK * 0.5, shift=shift)[0]).abs().max() < 0.05
    frozen = QUANTIZER.freeze(network)
    assert torch.allclose(frozen(X, mask=MASK * 0.5, shift=shift)[0], expected[0], atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "by_name", "message"),
    [
        ((X,), {}, "captured with x, mask, and this call lacks mask"),
        ((X, MASK), {"shift": X}, "captured without 'shift'"),
        ((X, MASK), {"scale": 2.0}, r"captured with scale=1.0, and cannot be called with 2.0"),
        ((X, MASK), {"mask": MASK}, "'mask' twice"),
        ((X, MASK), {"other": MASK}, "no argument 'other'; it takes x, mask, shift, scale"),
        ((X, MASK, MASK), {}, "takes 2 arguments by position, 3 were given"),
    ],
)
def test_a_call_that_the_graph_cannot_follow_is_refused(
    arguments: tuple[Any, ...], by_name: dict[str, Any], message: str
) -> None:
    network = capture(Masked(), lambda: {"x": X, "mask": MASK})
    with pytest.raises(InvalidValueError, match=message):
        network(*arguments, **by_name)


def test_plain_arguments_of_a_batch_are_set_in_the_graph() -> None:
    model = Masked()
    network = capture(model, lambda: {"x": X, "scale": 3.0})
    assert torch.allclose(network(X)[0], model(X, scale=3.0)[0])
    assert torch.allclose(network(X, scale=3.0)[0], network(X)[0])
    assert "forward" not in vars(model)


@pytest.mark.parametrize(("kind", "type_"), [("tuple", tuple), ("dict", dict), ("class", Result)])
def test_outputs_keep_their_type(kind: str, type_: type) -> None:
    network = capture(Masked(kind), lambda: (X,))
    result: Any = network(X)
    assert type(result).__name__ == type_.__name__
    total = {"tuple": lambda: result[1], "dict": lambda: result["total"], "class": lambda: result.total}[kind]()
    assert total.shape == (4,)


@pytest.mark.parametrize(
    ("item", "names"),
    [
        ((X, Y), ("x",)),
        ((X, MASK), ("x", "mask")),
        ((X, MASK, Y), ("x", "mask")),
        ({"mask": MASK, "x": X, "label": Y}, ("x", "mask")),
        ({"x": X, "shift": X}, ("x", "shift")),
        ({"x": X, "mask": None}, ("x",)),
    ],
    ids=["labels", "mask", "mask and labels", "dict", "by name only", "none"],
)
def test_every_input_of_a_batch_is_found(item: Any, names: tuple[str, ...]) -> None:
    assert read_batch(item, signature_of(Masked()))[0].names == names


def test_a_tensor_that_the_model_does_not_take_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"leave out what the model does not take \(weights\)"):
        read_batch({"x": X, "weights": X}, signature_of(Masked()))


def test_batches_with_other_inputs_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="batch 2 of the calibration data holds x, and batch 1 holds x, mask"):
        Batches([{"x": X, "mask": MASK}, {"x": X}], signature_of(Masked()))


def test_a_traced_module_of_torch_jit_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        traced = torch.jit.trace(nn.Linear(6, 6), X)
    with pytest.raises(ModelError, match="torch.jit.*pass the module that was traced"):
        QUANTIZER.quantize_model(traced, [X])


def test_a_compiled_network_takes_arguments_by_name() -> None:
    network = capture(Masked(), lambda: {"x": X, "mask": MASK})
    compiled = torch.compile(network, backend="eager")
    assert torch.allclose(compiled(X, mask=MASK)[0], network(X, MASK)[0])


class Others(nn.Module):
    """Takes tensors that its signature does not name, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, **others: Any) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(x) * others.get("scale", 1.0)
        return hidden * others["mask"] if "mask" in others else hidden


def test_tensors_behind_two_stars_are_inputs_with_a_free_batch() -> None:
    model = Others()
    network = QUANTIZER.quantize_model(model, [{"x": X, "mask": MASK, "scale": 2.0}])
    x, mask = torch.cat([X, X[:3]]), torch.rand(7, 6)
    assert (network(x, mask=mask) - model(x, mask=mask, scale=2.0)).abs().max() < 0.05
    with pytest.raises(InvalidValueError, match="captured with x, mask, and this call lacks mask"):
        network(x)
    assert "forward" not in vars(model)


# ---- free axes ----
class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).reshape(x.shape[0], -1, 2).mean(1)


def test_axes_that_differ_between_batches_are_free() -> None:
    network = QUANTIZER.quantize_model(Pooled(), [torch.rand(2, 5, 6), torch.rand(3, 9, 6)])
    assert network(torch.rand(4, 12, 6)).shape == (4, 2)


@pytest.mark.parametrize("axes", [{0: "batch", 1: "length"}, {1: Dim.AUTO}, [None, Dim.DYNAMIC, None]])
def test_free_axes_can_be_given(axes: Any) -> None:
    network = QUANTIZER.quantize_model(Pooled(), [torch.rand(2, 5, 6)], dynamic_shapes={"x": axes})
    assert network(torch.rand(2, 12, 6)).shape == (2, 2)


class Placed(nn.Module):
    """Has positions for 16 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.layer = nn.Embedding(9, 6), nn.Embedding(16, 6), nn.Linear(6, 4)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        places = self.positions.weight[: tokens.shape[1]]
        hidden: torch.Tensor = self.layer((self.tokens(tokens) + places) * mask.unsqueeze(-1))
        return hidden


def test_a_named_axis_may_have_the_limits_of_the_model() -> None:
    axes = {0: "batch", 1: "length"}
    batch = {"tokens": torch.arange(10).reshape(2, 5) % 9, "mask": torch.ones(2, 5)}
    network = QUANTIZER.quantize_model(Placed(), [batch], dynamic_shapes={"tokens": axes, "mask": axes})
    assert network(torch.ones(3, 16, dtype=torch.long), torch.ones(3, 16)).shape == (3, 16, 4)
    with pytest.raises(ModelError, match=r"free axes of dynamic_shapes: .*length.*Name the axis in every input"):
        QUANTIZER.quantize_model(Placed(), [batch], dynamic_shapes={"tokens": axes, "mask": {0: "batch"}})


@pytest.mark.parametrize(
    ("shapes", "message"),
    [({"y": {0: "batch"}}, "y is not among the inputs, which are x"), ({"x": {3: "length"}}, "'x' has 3 axes")],
)
def test_wrong_axes_are_refused(shapes: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        export_for_training(Pooled(), (torch.rand(2, 5, 6),), dynamic_shapes=shapes)
