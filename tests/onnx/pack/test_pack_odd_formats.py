"""Block formats that no preset has, and that files may: other widths, block sizes, sub-blocks."""

import numpy as np
import onnx
import pytest
from onnx import helper
from packed_models import model_of, outputs_of

from quark.formats.quantize import quantize_dequantize
from quark.onnx.pack import pack_model, unpack_model
from quark.ops.onnx_nodes import CONSTANT_DOMAIN
from quark.ops.schema import quantizer_of

BFP = "BFPQuantizeDequantize"
ODD = [
    *(
        (BFP, {"bit_width": width, "use_compiler_version_cpu_kernel": carry})
        for width in range(11, 17)
        for carry in (0, 1)
    ),
    *((BFP, {"bfp_method": "to_bfp_prime", "bit_width": 13, "sub_block_shift_bits": bits}) for bits in range(5)),
    *((BFP, {"bfp_method": "to_bfp_prime", "block_size": 32, "sub_block_size": size}) for size in (1, 4, 8, 32)),
    ("MXQuantizeDequantize", {"element_dtype": "fp4_e2m1", "block_size": 5}),
    ("MXQuantizeDequantize", {"element_dtype": "fp6_e3m2", "block_size": 1}),
    ("MXQuantizeDequantize", {"element_dtype": "fp8_e5m2", "block_size": 1000}),
]


@pytest.mark.parametrize("profile", ["portable", "custom"])
@pytest.mark.parametrize(("op_type", "attributes"), ODD, ids=str)
def test_odd_formats_run_and_come_back(tmp_path, op_type, attributes, profile):
    quantizer, axis, _ = quantizer_of(op_type, attributes)
    weights = {}
    for index, shape in enumerate([(24, 64), (8, 40, 3, 3)]):
        x = np.random.default_rng(index).standard_normal(shape).astype(np.float32)
        node = helper.make_node(op_type, [f"w{index}"], [f"m{index}"], domain=CONSTANT_DOMAIN, **attributes)
        weights[f"w{index}"] = (np.asarray(quantize_dequantize(x, quantizer.format, axis)), node)
    source, packed, back = (tmp_path / name for name in ("m.onnx", "packed.onnx", "back.onnx"))
    onnx.save(model_of(weights), source)
    assert len(pack_model(source, packed, profile).packed) == 2
    before, after = outputs_of(source), outputs_of(packed)
    assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())
    unpack_model(packed, back)
    assert back.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("profile", ["portable", "custom"])
@pytest.mark.parametrize("bit_width", [12, 13, 16])
def test_minus_zero_in_sign_and_magnitude(tmp_path, bit_width, profile):
    attributes = {"bit_width": bit_width}
    x = np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32)
    weight = np.array(quantize_dequantize(x, quantizer_of(BFP, attributes)[0].format, 1))
    weight[3, 5] = -0.0
    node = helper.make_node(BFP, ["w"], ["m"], domain=CONSTANT_DOMAIN, **attributes)
    source, packed, back = (tmp_path / name for name in ("m.onnx", "packed.onnx", "back.onnx"))
    onnx.save(model_of({"w": (weight, node)}), source)
    pack_model(source, packed, profile)
    assert outputs_of(packed)["y_w"].tobytes() == weight.tobytes()
    unpack_model(packed, back)
    assert back.read_bytes() == source.read_bytes()
