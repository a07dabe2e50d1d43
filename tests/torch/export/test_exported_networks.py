"""Whole networks as files: an NPU's linter has nothing to say, and float models come in every form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch_networks import images, trained
from torch_specs import settings

from quark.errors import InvalidValueError
from quark.onnx.lint import lint
from quark.torch import export_for_training
from quark.torch.export import write_onnx
from quark.torch.freeze import freeze
from quark.torch.quantization.pipeline import quantize_network

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("resnet", "non-overflow"), ("mobilenet", "tqt"), ("unet", "non-overflow")),
        *(pytest.param(*value, marks=pytest.mark.slow) for value in (("resnet", "tqt"), ("unet", "tqt"))),
    ],
)
def test_a_file_for_an_npu_passes_the_linter(kind: str, name: str, tmp_path: Path) -> None:
    network = freeze(quantize_network(trained(kind), [images(4)], settings(name)))
    report = write_onnx(network, images(1), tmp_path / "npu.onnx", dynamic_batch=False)
    assert report.parity is not None
    assert report.parity.first_divergence is None
    assert not lint(report.path)


@pytest.mark.parametrize("form", ["module", pytest.param("program", marks=pytest.mark.slow), "module of a program"])
def test_a_float_model_is_exported_in_every_form(form: str, tmp_path: Path) -> None:
    model = trained("mobilenet")
    program = export_for_training(model, (images(1),))
    given = {"module": model, "program": program, "module of a program": program.module()}[form]
    report = write_onnx(given, images(2), tmp_path / "float.onnx")
    session = onnxruntime.InferenceSession(report.path)
    (found,) = session.run(None, {session.get_inputs()[0].name: images(3).numpy()})
    with torch.no_grad():
        assert np.allclose(found, model(images(3)).numpy(), atol=1e-4)


def test_a_network_of_doubles_is_exported_in_float32(tmp_path: Path) -> None:
    model = trained("mobilenet").double()
    network = quantize_network(model, [images(4).double()], settings("int8"))
    report = write_onnx(network, images(2).double(), tmp_path / "doubles.onnx")
    assert report.parity is not None
    assert onnxruntime.InferenceSession(report.path).get_inputs()[0].type == "tensor(float)"


def test_an_example_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="'x' holds NaN or Inf"):
        write_onnx(trained("mobilenet"), images(2) * float("nan"), tmp_path / "nan.onnx")
