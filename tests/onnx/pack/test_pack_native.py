"""The native profile, by ONNX's own reference evaluator: the numbers of the unpacked file."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import reference
from packed_models import initializers, marked_model, outputs_of

from quark.demo import network_path
from quark.errors import ModelError
from quark.onnx import quantize
from quark.onnx.pack import pack_model, unpack_model
from quark.onnx.session import open_session

# (format, the types of its tensors, the first opset that has them)
NATIVE = (
    ("mxfp4_e2m1", "FLOAT4E2M1", 24),
    ("mxfp6_e2m3", "FLOAT6E2M3", 28),
    ("mxfp6_e3m2", "FLOAT6E3M2", 28),
    ("mxfp8_e4m3", "FLOAT8E4M3FN", 24),
    ("mxfp8_e5m2", "FLOAT8E5M2", 24),
    ("mxint8", "INT8", 24),
    ("bfp16", "INT8", 24),
    ("bfp16c", "INT8", 24),
)


@pytest.mark.parametrize(("fmt", "kind", "opset"), NATIVE, ids=[row[0] for row in NATIVE])
def test_native_is_exact_and_comes_back(tmp_path, fmt, kind, opset):
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip("the installed onnx does not have the type")
    source, packed, back = (tmp_path / name for name in ("m.onnx", "packed.onnx", "back.onnx"))
    onnx.save(marked_model(fmt), source)
    facts = pack_model(source, packed, "native")
    assert facts.packed
    assert "does not run" in facts.remarks[0]
    model = onnx.load(packed)
    onnx.checker.check_model(model, full_check=True)
    types = {onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in model.graph.initializer}
    assert types == {kind, "FLOAT8E8M0"}
    assert model.opset_import[0].version == opset
    names = [info.name for info in model.graph.output]
    found: Any = reference.ReferenceEvaluator(model).run(names, {"x": np.array(-0.0, np.float32)})
    for name, value in outputs_of(source).items():
        assert found[names.index(name)].tobytes() == value.tobytes(), name
    unpack_model(packed, back)
    assert initializers(back) == initializers(source)


def test_microexponents_have_no_type(tmp_path):
    onnx.save(marked_model("mx6"), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="no type for the microexponents of 'mx6'"):
        pack_model(tmp_path / "m.onnx", tmp_path / "packed.onnx", "native")


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 24, reason="onnx has the types, and opset 24, from 1.19 on")
def test_a_whole_network_is_the_same_to_the_reference_evaluator(tmp_path):
    """With the functions of its activations' quantizers."""
    images = np.random.default_rng(0).random((8, 1, 8, 8), dtype=np.float32)
    source = quantize(network_path(), images, "MXFP4E2M1").save(tmp_path / "m.onnx")
    pack_model(source, tmp_path / "packed.onnx", "native")
    model = onnx.load(tmp_path / "packed.onnx")
    (found,) = reference.ReferenceEvaluator(model).run(None, {model.graph.input[0].name: images[:1]})
    (expected,) = open_session(source).run(None, {model.graph.input[0].name: images[:1]})
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
