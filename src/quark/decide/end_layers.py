"""The first and the last layers of a network, and the wider types that they get (KeepFirstLast).

A layer is a product with a constant weight: Conv, ConvTranspose, Gemm, MatMul, LSTM ... It is first if there is no
other on any path from the inputs of the graph to it, and last if there is none from it to the outputs. A network with
several inputs has several first layers, such as the first convolution of each branch; Q, K and V of a transformer's
first block read the same tensor and are all first. A network with several outputs has several last layers, such as the
last convolution of each head. A product of two activations is no layer and is passed over.

These layers see the raw input and make the decision, and have few weights: a wider type there gains more accuracy for
its size than anywhere else. Only what is narrower than the wider type changes; an activation of 8 bits stays as it is.

`first_conv_float` is for 8-bit floats, which round an image worse than the 8-bit integers that it came in: convolutions
that are first stay in float, unless they are last too, and last layers are like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from quark.decide.operators import Kind, facts
from quark.decide.specs import AffineSpec, BlockSpec, FloatSpec, LayerSpec, TensorSpec, bits_of_spec
from quark.decide.view import Graph, Node
from quark.errors import InvalidValueError, unknown_name
from quark.formats.catalog import get_format
from quark.formats.quantize import choose_quantizer
from quark.formats.spec import BlockFormat, ScaleRule
from quark.plan import EIGHT_BIT_FLOATS, QuantizationPlan

OPTION = "KeepFirstLast"
FLOAT, FIRST_CONV = "float", "first_conv_float"
_BLOCK_RULES = {"mxfp8_e4m3": ScaleRule.RCEIL, "mxfp8_e5m2": ScaleRule.RCEIL, "mxint8": ScaleRule.FLOOR}
END_TYPES = (FLOAT, FIRST_CONV, "int8", *EIGHT_BIT_FLOATS, *_BLOCK_RULES)


@dataclass(frozen=True)
class EndLayers:
    """The types of first and last layers: `layer`, for layers whose own types are narrower; None leaves them in float.
    `label` is what the user wrote."""

    label: str
    layer: LayerSpec | None

    @staticmethod
    def named(label: str) -> EndLayers:
        """The end layers that a user configures by the name of a type, one of END_TYPES. Integers and 8-bit floats have
        a scale for each output channel of a weight and one for an activation, found by MinMax.

        >>> EndLayers.named("mxfp8_e4m3").layer.weight.format
        'mxfp8_e4m3'
        """
        if label not in END_TYPES:
            raise unknown_name(f"type for {OPTION}", label, END_TYPES)
        if label in (FLOAT, FIRST_CONV):
            return EndLayers(label, None)
        if label in _BLOCK_RULES:
            fmt = get_format(label)
            assert isinstance(fmt, BlockFormat), label
            blocks = BlockSpec(choose_quantizer(fmt, scale_rule=_BLOCK_RULES[label]))
            return EndLayers(label, LayerSpec(blocks, blocks))
        if label in EIGHT_BIT_FLOATS:
            small = FloatSpec(label, is_saturating=True, is_scaled=True)
            weight = replace(small, is_per_channel=True, has_searched_scales=True)
            return EndLayers(label, LayerSpec(small, weight))
        return EndLayers(label, LayerSpec(AffineSpec(label), AffineSpec(label, is_per_channel=True)))

    def layers(self, graph: Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the first and of the last layers that this applies to."""
        first, last = first_layers(graph), last_layers(graph)
        if self.label != FIRST_CONV:
            return tuple(first), tuple(last)
        return tuple(name for name in first if graph.by_name[name].op_type == "Conv" and name not in last), ()

    def of(self, own: LayerSpec | None) -> LayerSpec | None:
        """The types of a layer whose usual types would be `own`."""
        if own is None or self.layer is None:
            return None
        activation, weight = _wider(own.activation, self.layer.activation), _wider(own.weight, self.layer.weight)
        return replace(own, activation=activation, weight=weight)

    def remark(self, plan: QuantizationPlan, first: Iterable[str], last: Iterable[str]) -> str:
        """A remark about the layers that have wider types in the plan because of this."""
        kept = {reader.node for entry in plan if entry.reason.endswith(OPTION) for reader in entry.readers}
        kept |= {entry.node for entry in plan.skipped if entry.reason.startswith(OPTION)}
        parts = [
            f"{word} {', '.join(layers)}"
            for word, names in (("first", first), ("last", last))
            if (layers := [name for name in names if name in kept])
        ]
        return f"{OPTION} {self.label}: {'; '.join(parts) or 'no first or last layer has narrower types'}"

    def check(self, own: LayerSpec) -> None:
        """Raise if activations in blocks would become integers, which are placed on other tensors too."""
        if self.layer is None or own.activation is None:
            return
        activation = _wider(own.activation, self.layer.activation)
        if isinstance(activation, AffineSpec) and not isinstance(own.activation, AffineSpec):
            raise InvalidValueError(
                f"option '{OPTION}' = {self.label!r} with activations of {own.activation.format}: integers would also "
                "go on what these layers compute; use a type in blocks, such as 'mxfp8_e4m3'"
            )


def _wider(own: TensorSpec | None, wide: TensorSpec | None) -> TensorSpec | None:
    if own is None or wide is None or int(bits_of_spec(own)) >= int(bits_of_spec(wide)):
        return own
    if isinstance(own, BlockSpec) and isinstance(wide, BlockSpec):
        return replace(wide, axis=own.axis, follows_reduction=own.follows_reduction)
    return wide


def first_layers(graph: Graph) -> list[str]:
    """The names of the first layers, in the order of the graph."""
    return _ends(graph.nodes, lambda node: [value.producer for value in node.inputs if value is not None])


def last_layers(graph: Graph) -> list[str]:
    """The names of the last layers, in the order of the graph."""
    ends = _ends(
        list(reversed(graph.nodes)),
        lambda node: [reader for value in node.outputs for reader, _ in value.readers],
    )
    return list(reversed(ends))


def _ends(ordered: Iterable[Node], neighbours: Callable[[Node], list[Node | None]]) -> list[str]:
    """The layers with no other layer behind them in the direction of `neighbours`. In `ordered`, a node comes
    after its neighbours."""
    has_layer: set[str] = set()  # nodes that are layers, or have one in that direction
    ends = []
    for node in ordered:
        is_behind = any(neighbour is not None and neighbour.name in has_layer for neighbour in neighbours(node))
        if _is_layer(node) and not is_behind:
            ends.append(node.name)
        if is_behind or _is_layer(node):
            has_layer.add(node.name)
    return ends


def _is_layer(node: Node) -> bool:
    known = facts(node)
    if known is None or known.kind not in (Kind.COMPUTE, Kind.RECURRENT) or known.weight is None:
        return False
    weight = node.input(known.weight)
    return weight is not None and weight.constant is not None
