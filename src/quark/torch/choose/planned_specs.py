"""A plan of the ONNX side as specs of a network's layers: types are the plan's, ranges are found here.

Scales are not taken over: the file's weights may have been equalized or finetuned, and training moves them anyway.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from quark.errors import InvalidValueError
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.spec import BlockFormat, FloatFormat, IntFormat
from quark.mixed_precision import MixedPlan, Precision
from quark.plan import QuantizationPlan
from quark.ranges import MinMax
from quark.torch.choose.plan_transfer import PlannedLayer, layers_of_plan
from quark.torch.specs import AffineSpec, BlockSpec, FloatSpec, LayerSpecs, Settings, TensorSpec

_ACTIVATIONS, _WEIGHTS = " activations", " weights"


def with_plan(network: fx.GraphModule, settings: Settings, plan: QuantizationPlan | MixedPlan) -> Settings:
    """The settings with what the plan says of each layer."""
    planned = layers_of_plan(network, plan)
    if isinstance(plan, MixedPlan):
        words = {Precision.HIGH: plan.high, Precision.LOW: plan.low}
        planned = {
            node: PlannedLayer(*formats_in_words(words[each.precision]))
            for node, each in planned.items()
            if each.precision is not None
        }
    return replace(settings, by_node={node: _specs(each, settings.specs) for node, each in planned.items()})


def formats_in_words(words: str) -> tuple[str | None, str | None]:
    """(activations, weights) of what a mixed plan says of a precision; None is float.

    >>> formats_in_words("int16 activations, int8 weights"), formats_in_words("float")
    (('int16', 'int8'), (None, None))
    """
    first, comma, second = words.partition(", ")
    names = (first.removesuffix(_ACTIVATIONS), second.removesuffix(_WEIGHTS)) if comma else (words, words)
    activation, weight = (None if name == "float" else get_format(name).name for name in names)
    return activation, weight


def _specs(layer: PlannedLayer, common: LayerSpecs) -> LayerSpecs | None:
    if layer.input_format is None and layer.weight_format is None:
        return None
    data = _in_format(common.input, layer.input_format)
    return replace(
        common,
        input=data,
        output=None if common.output is None else _in_format(common.output, layer.input_format),
        weight=_in_format(common.weight, layer.weight_format),
    )


def _in_format(spec: TensorSpec | None, name: str | None) -> TensorSpec | None:
    """The spec with codes of that format; where it is of another kind, the plainest of the format's own."""
    if name is None:
        return None
    fmt = get_format(name)
    if isinstance(fmt, IntFormat):
        if not isinstance(spec, AffineSpec):
            return AffineSpec(fmt, MinMax(), fmt.signed)
        is_even = spec.is_symmetric and (fmt.signed or spec.learning is not None)
        return replace(spec, format=fmt, is_symmetric=is_even)
    if isinstance(fmt, BlockFormat):
        is_same = isinstance(spec, BlockSpec) and spec.quantizer.format == fmt
        return spec if is_same else BlockSpec(BlockQuantizer(fmt))
    if isinstance(fmt, FloatFormat) and name in ("float16", "bfloat16"):
        return FloatSpec(name)
    raise InvalidValueError(f"the plan has '{name}' for a layer: expected integers, blocks, float16 or bfloat16")
