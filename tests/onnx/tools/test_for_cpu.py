"""`quark convert --for cpu`: integer kernels, and the same outputs to the bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from written_models import build

from quark.cli.main import main
from quark.demo import network_path
from quark.errors import ModelError
from quark.onnx import quantize
from quark.onnx.convert.for_cpu import convert_for_cpu

F32, S8 = np.float32, np.int8
RNG = np.random.default_rng(7)

# a residual block for an NPU: int8 biases, and activations before the quantizers
BLOCK = """net (float[1, 8, 6, 6] x) => (float[1, 5] y)
{
    xq = QuantizeLinear(x, sx, z)
    xd = DequantizeLinear(xq, sx, z)
    wd = DequantizeLinear(w, sw, z)
    bd = DequantizeLinear(b, sb, z)
    c = Conv <pads = [1, 1, 1, 1]> (xd, wd, bd)
    r = Clip(c, low, high)
    rq = QuantizeLinear(r, sr, z)
    rd = DequantizeLinear(rq, sr, z)
    a = Add(rd, xd)
    p = Relu(a)
    pq = QuantizeLinear(p, sp, z)
    pd = DequantizeLinear(pq, sp, z)
    g = GlobalAveragePool(pd)
    f = Flatten(g)
    fq = QuantizeLinear(f, sr, z)
    fd = DequantizeLinear(fq, sr, z)
    vd = DequantizeLinear(v, sw, z)
    ed = DequantizeLinear(e, sb, z)
    y0 = Gemm <transB = 1> (fd, vd, ed)
    yq = QuantizeLinear(y0, sp, z)
    y = DequantizeLinear(yq, sp, z)
}"""


def block(**changes: np.ndarray) -> onnx.ModelProto:
    arrays = {
        "w": RNG.integers(-128, 128, (8, 8, 3, 3)).astype(S8),
        "v": RNG.integers(-128, 128, (5, 8)).astype(S8),
        "b": RNG.integers(-128, 128, 8).astype(S8),
        "e": RNG.integers(-128, 128, 5).astype(S8),
        "z": S8(0),
        "sx": F32(2**-5),
        "sw": F32(2**-8),
        "sb": F32(2**-6),
        "sr": F32(2**-4),
        "sp": F32(2**-4),
        "low": F32(0),
        "high": F32(6),
    }
    return build(BLOCK, opset=17, **{**arrays, **changes})


def computed(model: onnx.ModelProto, inputs: list[np.ndarray], optimized: Path | None = None) -> list[np.ndarray]:
    """What ONNX Runtime computes with all of its optimizations."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return [session.run(None, {name: x})[0] for x in inputs]


@pytest.mark.parametrize("scale", [0.2, 1.0, 20.0], ids=["small", "usual", "saturating"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"sx": F32(2**-3), "sp": F32(2**-6)}, {"low": F32(-1.03), "high": F32(2.97)}, {"sr": F32(2**-5)}],
    ids=["relu6", "other scales", "odd bounds", "beyond codes"],
)
def test_every_output_bit_stays_and_layers_become_integer_kernels(changes, scale, tmp_path):
    model = block(**changes)
    converted = convert_for_cpu(model)
    onnx.checker.check_model(converted, full_check=True)
    inputs = [(RNG.standard_normal((1, 8, 6, 6)) * scale).astype(F32) for _ in range(50)]
    before = computed(model, inputs)
    after = computed(converted, inputs, tmp_path / "optimized.onnx")
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
    assert len({x.tobytes() for x in before}) > 10, "outputs that are all alike would show nothing"
    kernels = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert (kernels["QLinearConv"], kernels["QLinearAdd"], kernels["QGemm"]) == (1, 1, 1)
    assert not kernels.keys() & {"Conv", "FusedConv", "Gemm", "Add", "Relu"}


def test_a_network_for_an_npu_keeps_every_bit_and_has_no_float_convolution(tmp_path):
    samples = RNG.random((12, 1, 8, 8), dtype=F32)
    model = quantize(network_path(), samples, "XINT8").model
    converted = convert_for_cpu(model)
    inputs = [RNG.random((1, 1, 8, 8), dtype=F32) * 3 - 1 for _ in range(100)]
    before, after = computed(model, inputs), computed(converted, inputs, tmp_path / "optimized.onnx")
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
    kernels = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    convolutions = sum(node.op_type == "Conv" for node in model.graph.node)
    assert kernels["QLinearConv"] == convolutions > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sw": F32(0.01)}, r"\(Conv\): scale .* is not a power of two"),
        ({"sb": F32(2**-15)}, r"\(Conv\): bias 'b' is not a whole number of steps"),
        ({"sw": F32(2**-30), "sb": F32(2**-12)}, r"\(Conv\): its sums may reach \d+ steps; float32 is exact up to"),
    ],
    ids=["scale", "bias", "sum"],
)
def test_what_cannot_be_exact_is_an_error_that_names_the_layer(changes, message):
    with pytest.raises(ModelError, match=message):
        convert_for_cpu(block(**changes))


def test_a_float_bias_is_an_error():
    model = block()
    text = BLOCK.replace("Conv <pads = [1, 1, 1, 1]> (xd, wd, bd)", "Conv <pads = [1, 1, 1, 1]> (xd, wd, fb)")
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    with pytest.raises(ModelError, match="its bias is not quantized"):
        convert_for_cpu(build(text, opset=17, fb=np.ones(8, F32), **arrays))


def test_the_command_writes_the_same_model(tmp_path):
    source, target, other = (tmp_path / name for name in ("in.onnx", "out.onnx", "other.onnx"))
    onnx.save(block(), source)
    runner = CliRunner()
    assert runner.invoke(main, ["convert", "--for", "cpu", str(source), str(target)]).exit_code == 0
    assert runner.invoke(main, ["convert", "for-cpu", str(source), str(other)]).exit_code == 0
    assert target.read_bytes() == other.read_bytes()
    assert runner.invoke(main, ["convert", "--for", "toaster", str(source), str(target)]).exit_code == 2
