"""Sessions: any form of a model, more outputs, nothing left behind."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.demo import network_path
from quark.demo.digits import load_digits
from quark.errors import ModelError
from quark.formats.native import library_file
from quark.onnx import quantize
from quark.onnx import session as module
from quark.onnx.progress import track
from quark.onnx.session import is_slow_to_optimize, open_session
from quark.ops.schema import DOMAIN


def network(op: str = "Relu") -> onnx.ModelProto:
    weights = numpy_helper.from_array(np.random.default_rng(0).standard_normal((8, 600)).astype(np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["product"], "m"), helper.make_node(op, ["product"], ["y"], "r")]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 600])
    graph = helper.make_graph(nodes, "network", [x], [y], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def forms(folder: Path) -> list[Any]:
    onnx.save(network(), folder / "m.onnx")
    serialized = network().SerializeToString()
    return [network(), ir.from_proto(network()), serialized, folder / "m.onnx", str(folder / "m.onnx")]


X = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)


@pytest.mark.parametrize("file_from", [1 << 30, 0], ids=["bytes", "file"])
def test_every_form_gives_the_same_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_from: int) -> None:
    monkeypatch.setattr(module, "_FILE_FROM_BYTES", file_from)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    product = X @ numpy_helper.to_array(network().graph.initializer[0])
    for model in forms(tmp_path):
        session = open_session(model, extra_outputs=["product", "y", "product"], threads=1)
        assert [output.name for output in session.get_outputs()] == ["y", "product"]
        assert not list((tmp_path / "scratch").iterdir())
        y, found = session.run(None, {"x": X})
        np.testing.assert_allclose(found, product, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(y, np.maximum(found, 0))
        assert [output.name for output in open_session(model).get_outputs()] == ["y"]


def test_the_model_is_not_changed() -> None:
    model = ir.from_proto(network())
    before = ir.to_proto(model).SerializeToString()
    open_session(model, extra_outputs=["product"])
    assert ir.to_proto(model).SerializeToString() == before


def test_without_a_temporary_file_the_bytes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(module, "_FILE_FROM_BYTES", 0)
    monkeypatch.setattr(ir, "save", refuse)
    assert open_session(network(), extra_outputs=["product"]).run(["y"], {"x": X})[0].shape == (3, 600)


@pytest.mark.parametrize("file_from", [1 << 30, 0], ids=["bytes", "file"])
def test_what_the_runtime_refuses_is_a_model_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_from: int
) -> None:
    monkeypatch.setattr(module, "_FILE_FROM_BYTES", file_from)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ModelError, match="NoSuchOperator"):
        open_session(network("NoSuchOperator"))
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 24, reason="onnx has opset 24 from 1.19 on")
def test_weights_of_small_types_are_to_be_unpacked(tmp_path: Path) -> None:
    packed = quantize(network_path(), None, "MXFP4E2M1").save(tmp_path / "native.onnx", pack="native")
    with pytest.raises(ModelError, match="profile native: give the model that 'quark unpack' makes.* portable"):
        open_session(packed)
    with pytest.raises(ModelError, match="refuses"):
        open_session(b"not a model")
    with pytest.raises(ModelError, match="nowhere"):
        open_session(network(), extra_outputs=["nowhere"])


def test_missing_providers_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "quark"):
        session = open_session(network(), providers=["NoSuchExecutionProvider"])
    assert "NoSuchExecutionProvider" in caplog.text
    assert session.get_providers() == ["CPUExecutionProvider"]


def test_optimizations_can_be_left_out() -> None:
    plain = open_session(network(), has_optimizations=False, has_library=False).run(None, {"x": X})[0]
    np.testing.assert_allclose(plain, open_session(network()).run(None, {"x": X})[0], rtol=1e-4, atol=1e-5)


def test_progress_is_silent_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with track(3, "working") as advance:
        advance()
    told = capfd.readouterr()
    assert told.out == told.err == ""


def test_progress_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with track(2, "working") as advance:
        advance()
        advance()
    told = capsys.readouterr()
    assert told.out == ""
    assert "working" in told.err


def test_custom_libraries_are_registered_in_every_session_of_the_block():
    """Ours is one; a session that has it anyway does not register it twice."""
    library = library_file()
    if library is None:
        pytest.skip("no compiled library")
    node = helper.make_node("BFPQuantizeDequantize", ["x"], ["y"], "q", domain=DOMAIN, axis=1)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in "xy"]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    with module.custom_libraries([library, library]):
        for has_library in (True, False):
            (y,) = open_session(model, has_library=has_library).run(None, {"x": X[:1]})
            assert y.shape == (1, 8)
    with pytest.raises(ModelError):
        open_session(model, has_library=False)


def optimized_operators(path: Path, target: Path, passes_left_out: Sequence[str]) -> Counter[str]:
    """The operators of a file as ONNX Runtime runs it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("optimization.disable_specified_optimizers", ";".join(passes_left_out))
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(target).graph.node)


@pytest.mark.parametrize("preset", ["A8W8", "INT8_CNN_DEFAULT"])
def test_passes_that_large_graphs_do_without_make_no_integer_kernels(tmp_path: Path, preset: str) -> None:
    path = quantize(network_path(), load_digits()[0].images[:16], preset).save(tmp_path / "m.onnx")
    usual, fewer = (optimized_operators(path, tmp_path / "o.onnx", value) for value in ((), module.PASSES_LEFT_OUT))
    assert usual["QLinearConv"]
    for operator in ("QLinearConv", "QGemm", "QLinearAdd", "QLinearGlobalAveragePool", "Conv", "Gemm"):
        assert fewer[operator] == usual[operator], operator


def test_large_quantized_graphs_are_opened_with_fewer_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    images = load_digits()[0].images[:16]

    def passes_left_out(model: Any) -> list[str]:
        options = open_session(model).get_session_options()
        entry: str = options.get_session_config_entry("optimization.disable_specified_optimizers")
        return entry.split(";") if entry else []

    usual = quantize(network_path(), images, "A8W8")
    path = usual.save(tmp_path / "m.onnx")
    assert not passes_left_out(usual.model)
    assert not passes_left_out(path)
    monkeypatch.setattr(module, "LARGE_GRAPH_DEQUANTIZERS", 5)
    assert passes_left_out(usual.model) == list(module.PASSES_LEFT_OUT)
    assert passes_left_out(ir.from_proto(usual.model)) == list(module.PASSES_LEFT_OUT)
    assert passes_left_out(path) == passes_left_out(path.read_bytes()) == list(module.PASSES_LEFT_OUT)
    assert not passes_left_out(onnx.load(network_path()))  # without quantizers the optimizer takes little time
    for damaged in (b"", path.read_bytes()[:-100], b"no model"):
        assert not is_slow_to_optimize(damaged)
    assert not is_slow_to_optimize(tmp_path / "nothing.onnx")
    told = quantize(network_path(), images, "A8W8").report
    assert [remark for remark in told.remarks if "optimizations of layouts" in remark]
    assert not [remark for remark in usual.report.remarks if "optimizations of layouts" in remark]
