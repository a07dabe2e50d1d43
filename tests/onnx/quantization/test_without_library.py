"""The package of Python alone: every kind of quantization, and what is done with its files, without the library."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import quark.demo
from quark.errors import MissingDependencyError
from quark.formats import native, quantize_dequantize
from quark.onnx import get_default_config, get_library_path, quantize
from quark.onnx.pack import pack_model, unpack_model
from quark.onnx.session import open_session
from quark.report.installation import _model_of_one_operator

# Block formats are quickly tried by packing one; here they are slow: the runtime puts every portable function in place.
SLOW = ("BFP16", "BF16", "S16S16_MIXED_S8S8", "BF16_MIXED_BFP16", "MXFP4E2M1")
PRESETS = ["XINT8", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
IMAGES = np.random.default_rng(0).random((4, 1, 8, 8), dtype=np.float32)


@pytest.fixture(autouse=True)
def _without_library(monkeypatch):
    native.load_library.cache_clear()
    for module in ("formats.native", "ops.library", "onnx.session"):
        monkeypatch.setattr(f"quark.{module}.library_file", lambda: None)
    yield
    monkeypatch.undo()
    native.load_library.cache_clear()


def outputs_in_stock_runtime(path):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: IMAGES})[0]


def test_the_library_is_not_there():
    with pytest.raises(MissingDependencyError, match="add_portable_functions"):
        get_library_path()
    assert native.instruction_set() is None


@pytest.mark.parametrize("preset", PRESETS)
def test_a_file_of_every_kind_is_made_and_runs(preset, tmp_path):
    path = quantize(quark.demo.network_path(), IMAGES, preset).save(tmp_path / "quantized.onnx")
    assert np.isfinite(outputs_in_stock_runtime(path)).all()


@pytest.mark.slow
def test_a_layer_is_finetuned_in_a_block_format(tmp_path):
    pytest.importorskip("torch")
    config = get_default_config("MXINT8")
    config.include_fast_ft = True
    config.extra_options = {**config.extra_options, "FastFinetune": {"NumIterations": 2, "OptimAlgorithm": "adaround"}}
    path = quantize(quark.demo.network_path(), IMAGES, config).save(tmp_path / "finetuned.onnx")
    assert np.isfinite(outputs_in_stock_runtime(path)).all()


@pytest.mark.parametrize("kind", ["path", "bytes", "proto", "graph"])
@pytest.mark.parametrize("opset", [13, 17])
def test_files_of_others_run_too(kind, opset, tmp_path):
    """Those that count on the library being registered."""
    proto = _model_of_one_operator()
    proto.opset_import[0].version = opset
    onnx.save(proto, tmp_path / "bare.onnx")
    kinds = {"path": lambda: tmp_path / "bare.onnx", "bytes": proto.SerializeToString, "proto": lambda: proto}
    session = open_session(kinds.get(kind, lambda: ir.from_proto(proto))())
    x = np.array([0.1, -0.7, 3.3, 6.1], np.float32)
    (y,) = session.run(None, {"x": x})
    assert np.array_equal(y, quantize_dequantize(x, "mxint8"))
    assert not proto.functions


def test_a_file_is_packed_and_unpacked(tmp_path):
    path = quantize(quark.demo.network_path(), IMAGES, "MXINT8").save(tmp_path / "mx.onnx")
    pack_model(path, tmp_path / "small.onnx")
    assert np.array_equal(outputs_in_stock_runtime(tmp_path / "small.onnx"), outputs_in_stock_runtime(path))
    unpack_model(tmp_path / "small.onnx", tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "mx.onnx").read_bytes()
