"""The block operators as torch modules compute what the operators do."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import run_model

from quark.onnx import add_portable_functions

torch = pytest.importorskip("torch")
from quark.onnx.algorithm.finetuning.create_torch.base_fn_quantizers import BFPQuantizer, MXQuantizer  # noqa: E402


@pytest.mark.parametrize(("kind", "attributes"), [
    (MXQuantizer, {"element_dtype": "fp6_e2m3", "axis": 1, "block_size": 8, "rounding_mode": 2}),
    (MXQuantizer, {}),
    (BFPQuantizer, {"bfp_method": "to_bfp", "bit_width": 13, "axis": -1}),
    (BFPQuantizer, {"bfp_method": "to_bfp_prime", "bit_width": 11, "block_size": 16, "sub_block_size": 2,
                    "sub_block_shift_bits": 1, "rounding_mode": 2, "convert_to_bfloat_before_bfp": 1}),
])  # fmt: skip
def test_modules_agree_with_the_operators_and_pass_gradients(kind, attributes):
    x = np.random.default_rng(0).normal(size=(2, 20, 3)).astype(np.float32)
    node = helper.make_node(kind.operator, ["x"], ["y"], domain="com.amd.quark", **attributes)
    ports = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, x.shape) for name in "xy"]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.amd.quark", 1)]
    model = helper.make_model(helper.make_graph([node], "g", ports[:1], ports[1:]), opset_imports=opsets, ir_version=8)
    given = torch.tensor(x, requires_grad=True)
    found = kind(attributes)(given)
    np.testing.assert_array_equal(found.detach().numpy(), run_model(add_portable_functions(model), {"x": x})["y"])
    found.sum().backward()
    assert torch.equal(given.grad, torch.ones_like(given))


def test_one_number_stays_and_wrong_attributes_are_refused():
    assert MXQuantizer({})(torch.tensor([0.3])) == torch.tensor([0.3])
    with pytest.raises(ValueError, match="element_dtype"):
        MXQuantizer({"element_dtype": "fp3"})
