"""A quantized file that is larger than its float file: the log, the report and the summary say why."""

from __future__ import annotations

import json
import logging

import numpy as np
import onnx
import pytest
from onnx_models import Net

from quark.onnx import quantize
from quark.report.summary import summary_text

X = [{"x": np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)} for _ in range(3)]


def network(*, has_float_reader: bool, size: int = 256) -> onnx.ModelProto:
    """A product, whose weight something else can read in float as well."""
    net = Net()
    weight = net.weight(64, size, name="w")
    y = net.node("MatMul", net.input("x", (4, 64)), weight, name="product")
    return net.model(*([y, net.node("Sin", weight)] if has_float_reader else [y]))


def saved(model, preset, tmp_path):
    onnx.save(model, tmp_path / "in.onnx")
    result = quantize(tmp_path / "in.onnx", X, preset)
    result.save(tmp_path / "out.onnx")
    return result.report, json.loads((tmp_path / "out.json").read_text())


def of_size(remarks) -> list[str]:
    return [remark for remark in remarks if "larger than the float file" in remark]


@pytest.mark.parametrize("preset", ["A8W8", "UINT8_DYNAMIC_QUANT"])
def test_a_weight_that_is_stored_twice(preset, tmp_path, caplog):
    report, content = saved(network(has_float_reader=True), preset, tmp_path)
    (remark,) = of_size(report.remarks)
    assert "1 weight is stored twice: quantized, and in float for readers that are not quantized (65.5 KB)" in remark
    assert "nodes_to_exclude" in remark
    assert of_size(content["remarks"]) == [remark]
    assert of_size([" ".join(summary_text(report).split())])
    assert remark in [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(("preset", "size", "cause"), [
    ("MXINT8", 256, "weights in mxint8 are stored rounded, in float (65.5 KB)"),
    ("A8W8", 4, "nodes, functions and metadata take"),
])  # fmt: skip
def test_growth_by_design_is_no_warning(preset, size, cause, tmp_path, caplog):
    report, _ = saved(network(has_float_reader=False, size=size), preset, tmp_path)
    (remark,) = of_size(report.remarks)
    assert cause in remark
    assert ("quark pack" in remark) == (preset == "MXINT8")
    assert not of_size(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


def test_a_smaller_file_has_no_remark(tmp_path):
    report, content = saved(network(has_float_reader=False), "A8W8", tmp_path)
    assert not of_size([*report.remarks, *content["remarks"]])


def test_a_weight_that_products_share_is_stored_once():
    net = Net()
    x, weight = net.input("x", (4, 64)), net.weight(64, 64, name="w")
    model = net.model(net.node("MatMul", net.node("MatMul", x, weight), weight))
    for preset in ("A8W8", "UINT8_DYNAMIC_QUANT"):
        stored = quantize(model, X, preset).model.graph.initializer
        assert [tensor.name for tensor in stored if np.prod(tensor.dims) == 64 * 64] == ["w_quantized"]
