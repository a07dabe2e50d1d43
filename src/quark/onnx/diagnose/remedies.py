"""What to do about a layer: options that exist here, apply to its operator and format, and are not in use already."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from quark.diagnosis import Action, Remedy
from quark.onnx.diagnose.causes import (
    has_long_tail,
    has_uneven_channels,
    is_clipped,
    is_rounded_bias,
    is_rounded_input,
    is_rounded_weight,
)
from quark.onnx.diagnose.layer_facts import LayerFacts
from quark.onnx.diagnose.operands import Kind, Operand
from quark.text import setting

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
PRODUCTS = frozenset({"MatMul", "Gemm"})
# the next wider element of OCP's formats, as the option has it
WIDER_ELEMENTS = {"mxfp4_e2m1": "fp6_e2m3", "mxfp6_e2m3": "int8", "mxfp6_e3m2": "fp8_e4m3", "mxfp8_e5m2": "fp8_e4m3"}
WIDER_MICROEXPONENTS = {"mx4": 13, "mx6": 16}
LONGEST_KEY = 1000  # YAML, which --set reads, takes keys of up to 1024 characters


def find_remedies(
    facts: LayerFacts, config: Mapping[str, Any], share: float | None, in_float: Collection[str] = ()
) -> tuple[Remedy, ...]:
    """Return the remedies for a layer, the likeliest to help first.

    `config` is what the file was made by, empty where it does not say. `in_float` names the nodes that stayed in float:
    a layer can be among them if what it reads is quantized.
    """
    return (
        *_about_scales(facts, config),
        *_about_inputs(facts, config),
        *_about_rounding(facts, config),
        *([] if facts.site.name in in_float else [_exclude(facts, share)]),
    )


def _about_scales(facts: LayerFacts, config: Mapping[str, Any]) -> Iterator[Remedy]:
    weight = facts.site.weight
    if weight is None or not has_uneven_channels(facts):
        return
    if not weight.has_power_of_two and not config.get("per_channel"):
        yield Remedy(Action.PER_CHANNEL, "give each channel of the weights its own scale", "per_channel=true")
    if facts.site.node.op_type in CONVOLUTIONS and not config.get("include_cle"):
        yield Remedy(Action.EQUALIZE, "even out channels between neighbouring layers", "include_cle=true")


def _about_inputs(facts: LayerFacts, config: Mapping[str, Any]) -> Iterator[Remedy]:
    data = facts.site.inputs[0] if facts.site.inputs else None
    if data is None or data.kind is not Kind.AFFINE:
        return
    used = str(config.get("calibrate_method", ""))
    if is_clipped(facts):
        method = "PowerOfTwoMethod.NonOverflow" if data.has_power_of_two else "CalibrationMethod.MinMax"
        if method.split(".")[-1] not in used:
            yield Remedy(Action.CALIBRATE, "take a range that holds all inputs", f"calibrate_method={method}")
        else:
            yield Remedy(Action.CALIBRATE, "calibrate on more samples: these inputs were not among them")
    if has_long_tail(facts):
        method = "PowerOfTwoMethod.MinMSE" if data.has_power_of_two else "CalibrationMethod.Percentile"
        if method.split(".")[-1] not in used:
            yield Remedy(Action.CALIBRATE, "take a range that leaves outliers out", f"calibrate_method={method}")
        if facts.site.node.op_type in PRODUCTS and not config.get("include_sq"):
            yield Remedy(Action.SMOOTH, "move the outliers of the input into the weights", "include_sq=true")


def _about_rounding(facts: LayerFacts, config: Mapping[str, Any]) -> Iterator[Remedy]:
    weight, data = facts.site.weight, facts.site.inputs[0] if facts.site.inputs else None
    can_learn = weight is not None and weight.kind in (Kind.AFFINE, Kind.BLOCK) and not config.get("include_fast_ft")
    if weight is not None and can_learn and is_rounded_weight(facts):
        yield _finetune(weight)
    if is_rounded_bias(facts) and not config.get("extra_options", {}).get("Int32Bias"):
        yield Remedy(Action.MORE_BITS, "32 bits for biases; an NPU that reads 8 will not take them", "Int32Bias=true")
    wider = None if data is None else _more_bits(data, facts)
    if wider is not None:
        yield wider


def _finetune(weight: Operand) -> Remedy:
    if weight.kind is Kind.AFFINE:
        return Remedy(Action.ADAROUND, "learn which way each weight is rounded (AdaRound)", "include_fast_ft=true")
    text = "learn the rounded weights (AdaQuant); also --set FastFinetune.OptimAlgorithm=adaquant"
    return Remedy(Action.ADAROUND, text, "include_fast_ft=true")


def _more_bits(data: Operand, facts: LayerFacts) -> Remedy | None:
    if data.kind is Kind.BLOCK:
        if data.format in WIDER_ELEMENTS:
            element = WIDER_ELEMENTS[data.format]
            return Remedy(Action.MORE_BITS, "wider elements, for all layers", f"MXAttributes.element_dtype={element}")
        if data.format in WIDER_MICROEXPONENTS:
            bits = WIDER_MICROEXPONENTS[data.format]
            return Remedy(Action.MORE_BITS, "wider elements, for all layers", f"BFPAttributes.bit_width={bits}")
        return None
    is_needed = is_rounded_input(facts) or has_long_tail(facts)
    if data.kind is not Kind.AFFINE or data.element_bits > 8 or not is_needed:
        return None
    if len(setting("", [data.source.name])) > LONGEST_KEY:
        return None
    override = {str(data.source.name): [{"quant_type": "QuantType.QInt16"}]}
    text = "16 bits for its input" + ("; an NPU that takes 8 bits will not run it" if data.has_power_of_two else "")
    return Remedy(Action.MORE_BITS, text, setting("TensorQuantOverrides", override))


def _exclude(facts: LayerFacts, share: float | None) -> Remedy:
    gain = (
        ""
        if share is None
        else f": {100 * share:.0f} % of the damage"
        if share >= 0.01
        else ": under 1 % of the damage"
    )
    cost = f", {facts.parameters:,} parameters in float" if facts.parameters else ""
    return Remedy(Action.EXCLUDE, f"leave it in float{gain}{cost}", setting("nodes_to_exclude", list(facts.site.nodes)))
