"""The operators of domain `com.amd.quark`: their inputs, attributes, defaults and legal values.

    MXQuantizeDequantize      the OCP microscaling formats
    BFPQuantizeDequantize     block float ("to_bfp") and shared microexponents ("to_bfp_prime")
    FloatScaleQuantizeDequantize   blocks whose scale is a small float, times one number for the tensor (NVFP4)
    ExtendedQuantizeLinear    x / scale + zero_point in the zero point's type, also where ONNX Runtime's own has none
    ExtendedDequantizeLinear  (x - zero_point) * scale

Names and defaults are those of existing files. FloatScaleQuantizeDequantize is ours, and so are two attributes of the
other block operators, `scale_rule` and `nonfinite`; files without them keep their meaning. The block operators ignore
`axis` for tensors of rank 0 and 1.

A BFP value has one sign bit, eight bits of shared exponent and `bit_width - 9` magnitude bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from quark.errors import InvalidValueError, UnsupportedTypeError, unknown_name
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import BLOCK_FORMATS, MX_ELEMENTS, sign_magnitude
from quark.formats.spec import BlockFormat, FloatFormat, NonFinite, Rounding, ScaleRule, SubBlocks

DOMAIN = "com.amd.quark"
VERSION = 1

AttributeValue = int | str

ROUNDING_MODES = tuple(Rounding)  # the attribute `rounding_mode` is an index

MAX_SUB_BLOCK = 2**31 - 1
BIT_WIDTH_OVERHEAD = 9  # the sign and the shared exponent's eight bits
QUANTIZED_TYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16")


@dataclass(frozen=True)
class Attribute:
    """An attribute of an operator, an integer or a string.

    Legal are the `choices` or, if there are none, the integers from `minimum` to `maximum`. A default of None means
    that it depends on other attributes.
    """

    name: str
    default: AttributeValue | None
    choices: tuple[AttributeValue, ...] = ()
    minimum: int | None = None
    maximum: int | None = None

    @property
    def kind(self) -> type[int] | type[str]:
        """The Python type of the values."""
        return str if self.choices and isinstance(self.choices[0], str) else int

    @property
    def legal(self) -> str:
        """The legal values, for messages."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        if self.minimum is None:
            return "an integer"
        return f"an integer of at least {self.minimum}" if self.maximum is None else f"{self.minimum}..{self.maximum}"

    @property
    def integers(self) -> range:
        """All legal values of an attribute with a minimum and a maximum."""
        assert self.minimum is not None, self.name
        assert self.maximum is not None, self.name
        return range(self.minimum, self.maximum + 1)

    def allows(self, value: AttributeValue) -> bool:
        if self.choices:
            return value in self.choices
        number = int(value)
        return (self.minimum is None or number >= self.minimum) and (self.maximum is None or number <= self.maximum)

    def checked(self, operator: str, value: object) -> AttributeValue:
        """value if it is legal; otherwise raises an error that lists the legal values."""
        subject = f"attribute '{self.name}' of {operator}: {value!r}"
        if not isinstance(value, (int, str)) or isinstance(value, bool) or not isinstance(value, self.kind):
            raise UnsupportedTypeError(f"{subject} has type {type(value).__name__}, expected {self.legal}")
        if not self.allows(value):
            raise InvalidValueError(f"{subject} is not legal, expected {self.legal}")
        return value


@dataclass(frozen=True)
class Operator:
    """An operator with its inputs, of which the last `optional_inputs` may be absent, and attributes; each has one
    output."""

    name: str
    inputs: tuple[str, ...]
    attributes: tuple[Attribute, ...]
    optional_inputs: int = 0

    @property
    def defaults(self) -> dict[str, AttributeValue]:
        """The values of absent attributes, without those that depend on others."""
        return {a.name: a.default for a in self.attributes if a.default is not None}

    def attribute(self, name: str) -> Attribute:
        return next(attribute for attribute in self.attributes if attribute.name == name)

    def resolve(self, attributes: Mapping[str, object]) -> dict[str, AttributeValue]:
        """The checked value of every attribute, with defaults; one that depends on others is left out if not given."""
        known = {attribute.name: attribute for attribute in self.attributes}
        for name in attributes:
            if name not in known:
                raise unknown_name(f"attribute of {self.name}", name, known)
        values: dict[str, AttributeValue] = {}
        for name, attribute in known.items():
            value = attributes.get(name, attribute.default)
            if value is not None or (name in attributes and attribute.default is not None):
                values[name] = attribute.checked(self.name, value)
        return values


AXIS = Attribute("axis", 1)
ROUNDING_MODE = Attribute("rounding_mode", 0, tuple(range(len(ROUNDING_MODES))))
SCALE_RULE = Attribute("scale_rule", ScaleRule.FLOOR.value, tuple(rule.value for rule in ScaleRule))
NONFINITE = Attribute("nonfinite", NonFinite.BLOCK_NAN.value, tuple(policy.value for policy in NonFinite))

# If absent, `nonfinite` depends on the method. A function's attribute must have a default; this one means absent.
BY_METHOD = ""

TO_BFP = "to_bfp"
TO_BFP_PRIME = "to_bfp_prime"
BFP_METHODS = (TO_BFP, TO_BFP_PRIME, "to_bfp_prime_shared")

MX_QUANTIZE_DEQUANTIZE = Operator(
    "MXQuantizeDequantize",
    ("x",),
    (
        Attribute("element_dtype", "int8", tuple(MX_ELEMENTS)),
        AXIS,
        Attribute("block_size", 32, minimum=1),
        ROUNDING_MODE,
        SCALE_RULE,
        NONFINITE,
    ),
)
BFP_QUANTIZE_DEQUANTIZE = Operator(
    "BFPQuantizeDequantize",
    ("x",),
    (
        Attribute("bfp_method", TO_BFP, BFP_METHODS),
        AXIS,
        Attribute("bit_width", 16, minimum=BIT_WIDTH_OVERHEAD + 1, maximum=30),
        Attribute("block_size", 8, minimum=1),
        Attribute("sub_block_size", 2, minimum=1),  # with microexponents a divisor of block_size
        Attribute("sub_block_shift_bits", 1, minimum=0, maximum=4),
        ROUNDING_MODE,
        Attribute("convert_to_bfloat_before_bfp", 0, (0, 1)),
        Attribute("use_compiler_version_cpu_kernel", 0, (0, 1)),
        SCALE_RULE,
        replace(NONFINITE, default=None),  # passthrough for to_bfp, block_nan for the others
    ),
)
TENSOR_SCALE = "tensor_scale"  # one float32 number; if it is absent, it is found from x
FLOAT_SCALES = tuple(name for name, element in MX_ELEMENTS.items() if isinstance(element, FloatFormat))
FLOAT_SCALE_QUANTIZE_DEQUANTIZE = Operator(
    "FloatScaleQuantizeDequantize",
    ("x", TENSOR_SCALE),
    (
        Attribute("element_dtype", "fp4_e2m1", tuple(MX_ELEMENTS)),
        Attribute("scale_dtype", "fp8_e4m3", FLOAT_SCALES),
        AXIS,
        Attribute("block_size", 16, minimum=1),
        replace(ROUNDING_MODE, default=ROUNDING_MODES.index(Rounding.HALF_EVEN)),
        replace(SCALE_RULE, choices=(ScaleRule.FLOOR.value, ScaleRule.MSE.value)),
        NONFINITE,
    ),
    optional_inputs=1,
)
BLOCK_OPERATORS = (MX_QUANTIZE_DEQUANTIZE.name, BFP_QUANTIZE_DEQUANTIZE.name, FLOAT_SCALE_QUANTIZE_DEQUANTIZE.name)
EXTENDED_AXIS = Attribute("axis", 0)
EXTENDED_QUANTIZE_LINEAR = Operator("ExtendedQuantizeLinear", ("x", "scale", "zero_point"), (EXTENDED_AXIS,))
EXTENDED_DEQUANTIZE_LINEAR = Operator("ExtendedDequantizeLinear", ("x", "scale", "zero_point"), (EXTENDED_AXIS,))

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        operator.name: operator
        for operator in (
            MX_QUANTIZE_DEQUANTIZE,
            BFP_QUANTIZE_DEQUANTIZE,
            FLOAT_SCALE_QUANTIZE_DEQUANTIZE,
            EXTENDED_QUANTIZE_LINEAR,
            EXTENDED_DEQUANTIZE_LINEAR,
        )
    }
)


def default_bfp_nonfinite(bfp_method: str) -> NonFinite:
    """The policy for NaN and Inf if the attribute `nonfinite` is absent."""
    return NonFinite.PASSTHROUGH if bfp_method == TO_BFP else NonFinite.BLOCK_NAN


def quantizer_of(
    op_type: str, attributes: Mapping[str, object], tensor_scale: float | None = None
) -> tuple[BlockQuantizer, int, bool]:
    """What a block operator with these attributes computes: the quantizer, its axis, and whether the input is rounded
    to bfloat16 first. Absent attributes have the operator's defaults; illegal values are errors. `tensor_scale` is the
    number in the input of that name; None if it is absent.

    >>> quantizer, axis, _ = quantizer_of("MXQuantizeDequantize", {"element_dtype": "fp4_e2m1"})
    >>> str(quantizer.format), axis, quantizer.rounding.value
    ('mxfp4_e2m1', 1, 'half_away')
    """
    if op_type not in BLOCK_OPERATORS:
        raise unknown_name("block operator", op_type, BLOCK_OPERATORS)
    values = OPERATORS[op_type].resolve(attributes)
    if op_type == MX_QUANTIZE_DEQUANTIZE.name:
        element = MX_ELEMENTS[str(values["element_dtype"])]
        fmt = _named(BlockFormat("mx", element, int(values["block_size"])))
    elif op_type == FLOAT_SCALE_QUANTIZE_DEQUANTIZE.name:
        element, scale = MX_ELEMENTS[str(values["element_dtype"])], MX_ELEMENTS[str(values["scale_dtype"])]
        assert isinstance(scale, FloatFormat), scale
        name = f"{scale}_scaled"
        fmt = _named(BlockFormat(name, element, int(values["block_size"]), scale=scale, has_tensor_scale=True))
    else:
        method, size = str(values["bfp_method"]), int(values["block_size"])
        magnitude_bits = int(values["bit_width"]) - BIT_WIDTH_OVERHEAD
        element, nonfinite = sign_magnitude(magnitude_bits), default_bfp_nonfinite(method)
        if method != TO_BFP:
            sub_blocks = SubBlocks(int(values["sub_block_size"]), int(values["sub_block_shift_bits"]))
            if size % sub_blocks.size or sub_blocks.size > MAX_SUB_BLOCK:
                raise InvalidValueError(
                    f"attribute 'sub_block_size' of {BFP_QUANTIZE_DEQUANTIZE.name}: {sub_blocks.size} is not legal, "
                    f"expected a divisor of block_size, which is {size}, of at most {MAX_SUB_BLOCK}"
                )
            fmt = _named(BlockFormat("microexponents", element, size, sub_blocks, True, False, nonfinite))
        else:
            carry = bool(values["use_compiler_version_cpu_kernel"])
            if carry:
                element = replace(element, name=f"int{magnitude_bits + 1}", symmetric=False)
            fmt = _named(BlockFormat("block_float", element, size, None, False, carry, nonfinite))
    quantizer = BlockQuantizer(
        fmt,
        ScaleRule(values["scale_rule"]),
        ROUNDING_MODES[int(values["rounding_mode"])],
        NonFinite(values.get("nonfinite", fmt.default_nonfinite)),
        tensor_scale,
    )
    return quantizer, int(values["axis"]), bool(values.get("convert_to_bfloat_before_bfp", 0))


def _named(fmt: BlockFormat) -> BlockFormat:
    """The catalog's format with these properties, else one with a descriptive name."""
    for row in BLOCK_FORMATS:
        if replace(fmt, name=row.name) == row.with_block_size(fmt.block_size):
            return row.with_block_size(fmt.block_size)
    shifts = f"_sub{fmt.sub_blocks.size}_shift{fmt.sub_blocks.shift_bits}" if fmt.sub_blocks else ""
    return replace(fmt, name=f"{fmt.name}_{fmt.element}{shifts}")
