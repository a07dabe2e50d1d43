"""The operators as values: defaults, legal values, and formats written down and read back."""

from __future__ import annotations

import pytest

from quark.errors import InvalidValueError, UnknownNameError, UnsupportedTypeError
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import BLOCK_FORMATS, MX_ELEMENTS
from quark.formats.spec import (
    BlockFormat,
    FloatFormat,
    IntFormat,
    NonFinite,
    Rounding,
)
from quark.ops.onnx_nodes import (
    block_attributes,
    make_block_node,
    make_extended_dequantize_node,
    make_extended_quantize_node,
    node_attributes,
)
from quark.ops.schema import DOMAIN, OPERATORS, quantizer_of

MX, BFP = "MXQuantizeDequantize", "BFPQuantizeDequantize"
FORMATS = {str(fmt): fmt for fmt in BLOCK_FORMATS}


def test_absent_attributes_mean_the_operators_defaults() -> None:
    assert quantizer_of(MX, {}) == (BlockQuantizer(FORMATS["mxint8"], rounding=Rounding.HALF_AWAY), 1, False)
    bfp16 = BlockQuantizer(FORMATS["bfp16"], rounding=Rounding.HALF_AWAY, nonfinite=NonFinite.PASSTHROUGH)
    assert quantizer_of(BFP, {}) == (bfp16, 1, False)
    assert [OPERATORS[name].resolve({}) for name in ("ExtendedQuantizeLinear", "ExtendedDequantizeLinear")] == [
        {"axis": 0},
        {"axis": 0},
    ]


@pytest.mark.parametrize(("name", "bit_width"), [("mx4", 11), ("mx6", 13), ("mx9", 16)])
@pytest.mark.parametrize("method", ["to_bfp_prime", "to_bfp_prime_shared"])
def test_the_presets_of_microexponents(name: str, bit_width: int, method: str) -> None:
    attributes = {"bfp_method": method, "bit_width": bit_width, "block_size": 16, "rounding_mode": 2, "axis": -1}
    assert quantizer_of(BFP, attributes) == (BlockQuantizer(FORMATS[name]), -1, False)


def test_the_compiler_variant_is_bfp16c_and_no_matter_for_microexponents() -> None:
    quantizer, _, converts = quantizer_of(
        BFP, {"use_compiler_version_cpu_kernel": 1, "convert_to_bfloat_before_bfp": 1, "rounding_mode": 2}
    )
    assert quantizer == BlockQuantizer(FORMATS["bfp16c"], nonfinite=NonFinite.PASSTHROUGH)
    assert converts
    prime = {"bfp_method": "to_bfp_prime", "block_size": 16}
    assert quantizer_of(BFP, {**prime, "use_compiler_version_cpu_kernel": 1}) == quantizer_of(BFP, prime)


def test_every_bit_width_is_a_sign_and_bit_width_minus_nine_magnitude_bits() -> None:
    for bit_width in range(10, 31):
        element = quantizer_of(BFP, {"bit_width": bit_width})[0].format.element
        assert isinstance(element, IntFormat)
        assert (element.bits, element.qmax, element.emax) == (bit_width - 8, 2 ** (bit_width - 9) - 1, 0)


def test_element_dtype_takes_the_elements_of_the_catalog() -> None:
    for name, element in MX_ELEMENTS.items():
        assert quantizer_of(MX, {"element_dtype": name})[0].format.element == element


@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("nonfinite", NonFinite)
def test_a_node_says_what_its_quantizer_was(fmt: BlockFormat, rounding: Rounding, nonfinite: NonFinite) -> None:
    for rule in fmt.scale_rules:
        for block_size in (fmt.block_size, 7 * (fmt.sub_blocks.size if fmt.sub_blocks else 1)):
            quantizer = BlockQuantizer(fmt.with_block_size(block_size), rule, rounding, nonfinite)
            node = make_block_node(quantizer, -2, "x", "y", "name")
            assert (node.domain, list(node.input), list(node.output), node.name) == (DOMAIN, ["x"], ["y"], "name")
            assert quantizer_of(node.op_type, node_attributes(node)) == (quantizer, -2, False)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
def test_our_attributes_are_written_only_where_absence_would_mean_something_else(fmt: BlockFormat) -> None:
    op_type, attributes = block_attributes(BlockQuantizer(fmt, nonfinite=fmt.default_nonfinite), 1)
    usual = MX if str(fmt).startswith(("mxfp", "mxint")) else BFP
    assert op_type == (usual if fmt.scale is None else "FloatScaleQuantizeDequantize")
    assert not {"scale_rule", "nonfinite"} & set(attributes)
    assert {"axis", "block_size", "rounding_mode"} <= set(attributes)
    other = NonFinite.BLOCK_NAN if fmt.default_nonfinite is NonFinite.PASSTHROUGH else NonFinite.PASSTHROUGH
    assert block_attributes(BlockQuantizer(fmt, nonfinite=other), 1)[1]["nonfinite"] == other.value
    for rule in fmt.scale_rules[1:]:
        assert block_attributes(BlockQuantizer(fmt, rule), 1)[1]["scale_rule"] == rule.value


def test_an_attribute_without_a_value_is_no_default() -> None:
    with pytest.raises(UnsupportedTypeError, match="'axis' of MXQuantizeDequantize: None"):
        quantizer_of("MXQuantizeDequantize", {"axis": None})


def test_rounding_to_bfloat16_first_is_an_attribute_of_bfp_alone() -> None:
    node = make_block_node(BlockQuantizer(FORMATS["mx9"]), 1, "x", "y", convert_to_bfloat=True)
    assert quantizer_of(node.op_type, node_attributes(node))[2]
    with pytest.raises(InvalidValueError, match="convert_to_bfloat.*mxint8"):
        make_block_node(BlockQuantizer(FORMATS["mxint8"]), 1, "x", "y", convert_to_bfloat=True)


@pytest.mark.parametrize(
    ("op_type", "attributes", "error", "message"),
    [
        (MX, {"element_dtype": "fp8"}, InvalidValueError, "'element_dtype'.*'fp8'.*fp8_e5m2.*int8sym"),
        (MX, {"element_dtype": "INT8"}, InvalidValueError, "'element_dtype'.*'INT8'"),
        (MX, {"element_dtype": 8}, UnsupportedTypeError, "'element_dtype'.*8 has type int"),
        (MX, {"block_size": 0}, InvalidValueError, "'block_size'.*0.*at least 1"),
        (MX, {"block_size": "32"}, UnsupportedTypeError, "'block_size'.*'32' has type str"),
        (MX, {"block_size": True}, UnsupportedTypeError, "'block_size'.*bool"),
        (MX, {"rounding_mode": 3}, InvalidValueError, "'rounding_mode'.*3.*0, 1, 2"),
        (MX, {"scale_rule": "flor"}, InvalidValueError, "'scale_rule'.*'flor'.*floor, ceil, even, rceil, mse"),
        (MX, {"nonfinite": "nan"}, InvalidValueError, "'nonfinite'.*'nan'.*block_nan, passthrough"),
        (MX, {"element_type": "int8"}, UnknownNameError, "'element_type'.*element_dtype"),
        (MX, {"bit_width": 16}, UnknownNameError, "MXQuantizeDequantize 'bit_width'"),
        (BFP, {"bfp_method": "bfp"}, InvalidValueError, "'bfp_method'.*'bfp'.*to_bfp, to_bfp_prime"),
        (BFP, {"bit_width": 9}, InvalidValueError, "'bit_width'.*9.*10..30"),
        (BFP, {"bit_width": 31}, InvalidValueError, "'bit_width'.*31.*10..30"),
        (BFP, {"sub_block_size": 0}, InvalidValueError, "'sub_block_size'.*0"),
        (
            BFP,
            {"bfp_method": "to_bfp_prime", "block_size": 16, "sub_block_size": 3},
            InvalidValueError,
            "'sub_block_size'.*3.*block_size, which is 16",
        ),
        (BFP, {"sub_block_shift_bits": 5}, InvalidValueError, "'sub_block_shift_bits'.*5.*0..4"),
        (BFP, {"convert_to_bfloat_before_bfp": 2}, InvalidValueError, "'convert_to_bfloat_before_bfp'.*2"),
        (BFP, {"use_compiler_version_cpu_kernel": 1, "scale_rule": "ceil"}, InvalidValueError, "must be 'floor'"),
        ("QuantizeLinear", {}, UnknownNameError, "block operator 'QuantizeLinear'"),
    ],
)
def test_an_illegal_attribute_is_named_with_the_legal_values(
    op_type: str, attributes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quantizer_of(op_type, attributes)


@pytest.mark.parametrize(
    ("fmt", "message"),
    [
        (BlockFormat("odd_float", FloatFormat("fp5_e2m2", 2, 2), 32), "fp5_e2m2.*no signed integer"),
        (BlockFormat("unsigned", IntFormat("uint8", 8, signed=False), 32), "uint8"),
        (BlockFormat("whole", IntFormat("int8", 8), 32), "one integer bit"),
        (BlockFormat("flushing", IntFormat("int8sym", 8, True, 6, True), 8, flush_subnormals=True), "come together"),
        (
            BlockFormat("lowest", IntFormat("int9", 9, True, 7), 8),
            "lowest code",
        ),
    ],
    ids=str,
)
def test_a_format_that_no_operator_can_be_says_why(fmt: BlockFormat, message: str) -> None:
    with pytest.raises(InvalidValueError, match=f"'{fmt}'.*{message}"):
        make_block_node(BlockQuantizer(fmt), 1, "x", "y")


def test_a_format_of_ones_own_that_the_operator_can_be() -> None:
    fmt = BlockFormat("block_float_int6sym", IntFormat("int6sym", 6, True, 4, symmetric=True), 24)
    node = make_block_node(BlockQuantizer(fmt), 0, "x", "y")
    assert node_attributes(node)["nonfinite"] == "block_nan"
    quantizer = quantizer_of(node.op_type, node_attributes(node))[0]
    assert (quantizer.format.element, quantizer.format.block_size) == (fmt.element, 24)
    assert quantizer.nonfinite is NonFinite.BLOCK_NAN


def test_extended_nodes_name_their_inputs_in_order() -> None:
    for make in (make_extended_quantize_node, make_extended_dequantize_node):
        node = make("x", "s", "z", "y", 2, "n")
        assert (list(node.input), list(node.output), node.name, node.domain) == (["x", "s", "z"], ["y"], "n", DOMAIN)
        assert node_attributes(node) == {"axis": 2}
        assert len(node.input) == len(OPERATORS[node.op_type].inputs)
