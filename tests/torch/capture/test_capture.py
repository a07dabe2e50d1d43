"""A captured network computes what the model did, in both modes, for any batch, and leaves the model alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch_networks import KINDS, images, trained

from quark.errors import ModelError
from quark.torch import export_for_training
from quark.torch.capture import capture


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def captured(model: Any, x: torch.Tensor | None = None) -> Any:
    return capture(model, lambda: (images(2) if x is None else x,))


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_network_computes_what_the_model_did(kind: str) -> None:
    model, x = trained(kind), images()
    network = captured(model)
    assert torch.equal(network(x), model(x))
    assert torch.equal(network(x[:1]), model(x[:1]))


@pytest.mark.parametrize("kind", ["resnet", "mobilenet", "unet"])
def test_training_is_that_of_the_model(kind: str) -> None:
    model, x = trained(kind).train(), images()
    network = captured(model).train()
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    assert torch.equal(network(x), expected)
    statistics = {name: buffer for name, buffer in network.named_buffers() if "running" in name}
    assert statistics
    for name, buffer in model.named_buffers():
        if name in statistics:
            assert torch.equal(statistics[name], buffer), name


@pytest.mark.parametrize("form", ["program", "module", "training program"])
def test_every_form_of_a_model_gives_the_same_network(form: str) -> None:
    model, x = trained("resnet"), images()
    if form == "training program":
        model.train()
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
        model.eval()
    else:
        program = export_for_training(model, (x[:1],))
    network = captured(program if form != "module" else program.module())
    assert torch.equal(network(x), model(x))


def test_parameters_keep_their_names_and_are_copies() -> None:
    model = trained("resnet")
    before = copy.deepcopy(model.state_dict())
    network = captured(model)
    assert set(network.state_dict()) == set(model.state_dict())
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_exporting_keeps_the_mode_of_every_module() -> None:
    model = trained("resnet").train()
    model.bn1.eval()
    export_for_training(model, (images(1),))
    assert model.training
    assert not model.bn1.training
    assert model.layer1.training


def test_a_batch_of_one_stays_free() -> None:
    program = export_for_training(trained("mobilenet"), (images(1),))
    assert program.module()(images(5)).shape == (5, 5)


def test_a_fixed_batch_can_be_asked_for() -> None:
    program = export_for_training(trained("mobilenet"), (images(1),), dynamic_batch=False)
    with pytest.raises(Exception, match="(?i)shape|size|guard|expected"):
        program.module()(images(5))


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


def test_control_flow_on_values_is_refused_with_the_line() -> None:
    with pytest.raises(ModelError, match=r"test_capture\.py:\d+ \(if x\.sum\(\) > 0:\).*torch\.where.*quark\.onnx"):
        captured(Branching())


class WritesIntoView(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        part = y[:, 0]
        part.add_(1)
        return y


def test_writing_into_a_view_is_refused_with_the_line() -> None:
    with pytest.raises(ModelError, match=r"test_capture\.py:\d+.*view of 'mul'"):
        captured(WritesIntoView())


class WritesInPlace(nn.Module):
    """Reads the old name after it was written to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(1)
        z = torch.relu_(y)
        return y + z


def test_in_place_operators_change_every_later_reader() -> None:
    x = images(2)
    model = WritesInPlace()
    network = captured(model)
    assert torch.equal(network(x), model(x))
    assert not any(
        str(node.target).split(".")[-2].endswith("_") for node in network.graph.nodes if "aten" in str(node.target)
    )


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    network = captured(Tied(), torch.rand(2, 4))
    assert len({id(parameter) for parameter in network.parameters()}) == 1


def test_what_is_no_model_is_refused() -> None:
    from quark.torch.capture import signature_of

    with pytest.raises(ModelError, match="expected a torch.nn.Module.*quark.onnx"):
        signature_of("model.onnx")
