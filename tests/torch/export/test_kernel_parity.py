"""Integer kernels of the runtime that differ by more than rounding are noticed, however close the outputs are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from frozen_networks import example_of, frozen_network

from quark.torch.export import ParityError, export_onnx, parity
from quark.torch.export.parity import GraphReference, ParityReport, check_parity, outputs_of
from quark.torch.train.quantizers import Quantizer

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def network() -> torch.fx.GraphModule:
    return frozen_network("plain", "uint8")


def test_without_rounding_of_activations_a_network_is_close_and_stays_as_it_was(network) -> None:
    reference, inputs = GraphReference(network), (example_of("plain"),)
    before = outputs_of(network, inputs)[0]
    exact = reference.run_in_float(inputs)[0]
    assert 0 < abs(exact - before).max() < 0.2 * abs(before).max()
    assert (outputs_of(network, inputs)[0] == before).all()
    assert not any(module._forward_hooks for module in network.modules() if isinstance(module, Quantizer))


@pytest.mark.parametrize(
    ("below_rounding_db", "plain_db", "is_refused"),
    [(10.0, math.inf, True), (10.0, 0.0, False), (2.0, math.inf, False)],
    ids=["kernels_differ", "plain_differs_too", "as_rounding_does"],
)
def test_the_kernels_are_judged_at_every_level(network, monkeypatch, below_rounding_db, plain_db, is_refused) -> None:
    batches = [(example_of("plain"),)]
    rounding = min(parity._rounding_sqnr_db(GraphReference(network), batches), parity.NEGLIGIBLE_SQNR_DB)
    assert rounding > 20  # above what used to be suspicious in any case
    report = ParityReport(4, 0.1, rounding - below_rounding_db)
    found = {True: report, False: replace(report, sqnr_db=plain_db)}

    def compared(network, path, batches, *, has_optimizations=True):
        return found[has_optimizations]

    monkeypatch.setattr(parity, "compare_outputs", compared)
    monkeypatch.setattr(parity, "first_divergence", lambda *arguments: None)
    if is_refused:
        with pytest.raises(ParityError, match="less so without the runtime's integer kernels"):
            check_parity(network, Path("n.onnx"), batches, {})
    else:
        assert check_parity(network, Path("n.onnx"), batches, {}) is report


@pytest.mark.parametrize(
    ("exact", "kinds"),
    [(("MatMul", "Gemm", "Conv", "ConvTranspose"), {"INT16"}), ((), {"INT8"})],
    ids=["sixteen_bits_help", "nothing_helps"],
)
def test_weights_get_sixteen_bits_where_the_kernels_are_not_exact(network, monkeypatch, tmp_path, exact, kinds) -> None:
    """A processor whose 8-bit kernels saturate, in the place of this one."""
    example = example_of("plain")
    unchanged = export_onnx(network, tmp_path, example, file_name="before.onnx")
    compare = parity.compare_outputs

    def compared(network, path, batches, *, has_optimizations=True):
        model = onnx.load(path)
        stored = {each.data_type for each in model.graph.initializer if each.name.endswith("weight_quantized")}
        is_exact = not has_optimizations or (exact and onnx.TensorProto.INT8 not in stored)
        return compare(network, path, batches) if is_exact else ParityReport(4, 9.0, -3.0)

    monkeypatch.setattr(parity, "compare_outputs", compared)
    if exact:
        report = export_onnx(network, tmp_path, example)
        assert "are stored in 16 bits" in report.notes[0]
    else:
        with pytest.raises(ParityError, match="less so without the runtime's integer kernels"):
            export_onnx(network, tmp_path, example)
    files = [onnx.load(tmp_path / name) for name in ("before.onnx", "quark_model.onnx")]
    stored = [each for each in files[1].graph.initializer if each.name.endswith("weight_quantized")]
    assert {onnx.TensorProto.DataType.Name(each.data_type) for each in stored} == kinds
    first, second = ({each.name: onnx.numpy_helper.to_array(each) for each in file.graph.initializer} for file in files)
    assert all((first[each.name] == second[each.name]).all() for each in stored)
    assert unchanged.notes == ()
