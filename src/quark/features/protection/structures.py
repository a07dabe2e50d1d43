"""Parts of a graph that 8 bits are known to break, recognised without running the network.

post-processing   What follows the last layers with trained weights: boxes and scores joined in one tensor, the
                  distribution-to-box Softmax and its product, scaling by strides, Sigmoid and Softmax outputs. One
                  scale for coordinates of 0 to 640 and scores of 0 to 1 leaves nothing of the scores.
attention         Softmax, and masks of -1e4 and below: with one of them in a tensor, a step of 8 bits is 40. Where a
                  Softmax is over many positions, most of its results are below half a step, so that the product that
                  reads them is left in float too.
gated activation  x * Sigmoid(x), x * HardSigmoid(x) and GELU written as several nodes: a quantizer inside rounds the
                  same value two or three times.
rotary embedding  x cos + rotated(x) sin written as several nodes: the same value would be rounded three times.
normalization     Layer and RMS normalization as one node or as several, and the residual stream that it reads: a few
                  channels are a hundred times as large as the rest. Everything between the products of such a network
                  is float, except for tables that rows are gathered from.
audio front end   Layers whose result goes into a logarithm: what is small there counts as much as what is large. Either
                  they are few, or they are a spectrum written as convolutions (STFT, constant-Q), without activations,
                  also where the logarithm is what the network gives.
                  Magnitudes of such a spectrum are as uneven without a logarithm.
elementwise chain Mul, Add, Sub and Div with a constant, between the layers: a quantizer behind each of them rounds the
                  same value again and again, and integers make them no faster.
no integer form   PRelu, ConvTranspose and interpolating Resize, which ONNX Runtime computes in float in any case.

vocabulary        The last product of a transformer, if it is over a vocabulary: words are often nearly as likely as
                  each other, and rounding its input decides between them. Its weight is quantized, its input is not.

An NPU computes convolutional networks as a whole, so that for it only post-processing is left to the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from quark.decide import Target
from quark.decide.operators import RECURRENT_TYPES, Kind
from quark.onnx.graph import attribute, constant, dimensions, is_constant, readers
from quark.onnx.large_tensors import pieces
from quark.onnx.macs import PRODUCTS, weight_count
from quark.onnx.optimize.rewrite import made_by, scalar, squared
from quark.onnx.view import operator_facts

NORMS = frozenset(
    {
        *("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"),
        *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "EmbedLayerNormalization"),
    }
)
GATES = frozenset({"Sigmoid", "HardSigmoid", "Tanh", "Erf", "Softplus"})
ACTIVATIONS = GATES | {"Relu", "LeakyRelu", "PRelu", "Elu", "HardSwish", "Gelu", "Softmax"}
ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Pow"})
MOST_GATE_NODES = 6  # nodes that compute the argument of a gate
# a tail without any of these only moves, sums or pools the outputs of the last layers
TELLTALE = {
    *("Sigmoid", "HardSigmoid", "Softmax", "LogSoftmax", "Exp", "Log", "Mul", "Div", "Sub", "Pow", "Sqrt", "Concat"),
    *("TopK", "NonMaxSuppression", "ArgMax", "ReduceMax", "GridSample", "ScatterND", "Where"),
}
FEWEST_WEIGHTS = 512  # a layer with fewer, as the 16 of a distribution-to-box product, is not a trained one
MASK_VALUE = 1e3
FEWEST_WORDS = 8192  # the size of a vocabulary
FEWEST_NORMS = 2
REDUCTIONS = {"ReduceMean", "ReduceSum", "GlobalAveragePool"}  # GlobalAveragePool: a ReduceMean that a rewrite changed
MOST_MEAN_NODES = 16  # nodes that compute a variance
PASSING_MASKS = {
    *("Add", "Sub", "Mul", "Where", "Expand", "Cast", "Slice", "Unsqueeze", "Squeeze", "Reshape", "Concat", "Tile"),
    *("Min", "Max", "Clip"),
}
MOST_POSITIONS = 256  # of a Softmax whose results 8 bits can tell from zero

POST_PROCESSING = "post-processing behind the last layers, where one tensor holds values of different scales"
ATTENTION = "attention: a Softmax, or a mask of large negative numbers"
LONG_ATTENTION = f"a product with a Softmax over more than {MOST_POSITIONS} positions, most of which 8 bits make zero"
GATED = "inside a gated activation"
ROTARY = "inside a rotary embedding"
NORMALIZED = "between the products of a network with layer normalization, whose residual stream has outliers"
AUDIO = "before a logarithm or the magnitudes of a spectrum, where small values count as much as large ones"
CHAINED = "a constant factor or offset between layers: rounding after each of them adds up"
NO_KERNEL = "computed in float by ONNX Runtime in any case"


@dataclass(frozen=True)
class Structures:
    """`kept_float` maps the names of nodes to the reason why they stay in float. With `has_float_products`, outputs of
    Gemm and MatMul are not quantized for nodes that stay in float. With `has_own_concat_scales`, the inputs of a Concat
    keep scales of their own."""

    kept_float: dict[str, str] = field(default_factory=dict)
    has_float_products: bool = False
    has_own_concat_scales: bool = False
    weights_only: tuple[str, ...] = ()  # products with a quantized weight and an input in float


def find_structures(model: ir.Model, target: Target) -> Structures:
    """Find the nodes that should stay in float for networks that run on `target`."""
    nodes = list(model.graph)
    kept: dict[str, str] = {}

    def keep(matching: Iterable[ir.Node], reason: str) -> None:
        for node in matching:
            kept.setdefault(str(node.name), reason)

    keep(_post_processing(nodes), POST_PROCESSING)
    if target is Target.NPU_CNN:
        return Structures(kept)
    keep(_attention(nodes), ATTENTION)
    keep(_long_attention(nodes), LONG_ATTENTION)
    is_normalized = sum(map(_is_norm, nodes)) >= FEWEST_NORMS
    if is_normalized:
        rest = (node for node in nodes if node.op_type not in PRODUCTS and node.op_type not in RECURRENT_TYPES)
        tables = {node for node in nodes if node.op_type == "Gather" and is_constant(node.inputs[0])}
        keep((node for node in rest if node not in tables), NORMALIZED)
    keep(_gated_activations(nodes), GATED)
    keep(_rotary_embeddings(nodes), ROTARY)
    keep(_audio_front_end(nodes), AUDIO)
    if target is Target.ONNX_RUNTIME:
        keep((node for node in nodes if _has_constant_operand(node)), CHAINED)
        keep((node for node in nodes if _has_no_kernel(node)), NO_KERNEL)
    has_own_scales = target is Target.ONNX_RUNTIME
    words = _vocabularies(nodes) if is_normalized and target is Target.NPU_TRANSFORMER else []
    return Structures(kept, is_normalized, has_own_scales, tuple(str(node.name) for node in words))


def _is_layer(node: ir.Node) -> bool:
    """True if the node has enough weights to be a trained layer."""
    if node.op_type in RECURRENT_TYPES:
        return True
    return node.op_type in PRODUCTS and weight_count(node) >= FEWEST_WEIGHTS


def _closure(start: Iterable[ir.Node], step: Callable[[ir.Node], Iterable[ir.Node]]) -> set[ir.Node]:
    """The nodes reachable from `start` by `step`, including `start`."""
    seen = set(start)
    pending = list(seen)
    while pending:
        for node in step(pending.pop()):
            if node not in seen:
                seen.add(node)
                pending.append(node)
    return seen


def _producers(node: ir.Node) -> list[ir.Node]:
    made = (value.producer() for value in node.inputs if value is not None)
    return [producer for producer in made if producer is not None]


def _readers(node: ir.Node) -> list[ir.Node]:
    return [reader for value in node.outputs for reader, _ in readers(value)]


def _post_processing(nodes: list[ir.Node]) -> list[ir.Node]:
    """The nodes behind the last layers, if they do more than move and pool the layers' outputs.

    Activations that are computed with the layer before them stay with it.
    """
    layers = [node for node in nodes if _is_layer(node)]
    if not layers:
        return []
    before = _closure(layers, _producers)
    behind = _closure(layers, _readers)
    tail = [node for node in nodes if node not in before and node in behind and not _is_layer(node)]
    if not any(node.op_type in TELLTALE for node in tail):
        return []

    def is_fused(node: ir.Node) -> bool:
        known = operator_facts(node)
        is_activation = known is not None and known.kind is Kind.ACTIVATION
        return is_activation and any(_is_layer(producer) for producer in _producers(node))

    return [node for node in tail if not is_fused(node)]


def _attention(nodes: list[ir.Node]) -> list[ir.Node]:
    """Softmax nodes, and the nodes that large negative constants pass through on their way to one."""
    softmaxes = [node for node in nodes if node.op_type in ("Softmax", "LogSoftmax")]
    masked: set[ir.Node] = set()
    for node in nodes:
        is_reached = any(producer in masked for producer in _producers(node))
        if node.op_type in PASSING_MASKS and (is_reached or any(_holds_mask(value) for value in node.inputs)):
            masked.add(node)
    softmax = _closure(softmaxes, lambda node: [producer for producer in _producers(node) if producer in masked])
    return [node for node in nodes if node in softmax]


def _long_attention(nodes: list[ir.Node]) -> list[ir.Node]:
    """The products that read a Softmax over many positions."""
    products: list[ir.Node] = []
    for node in nodes:
        sizes = dimensions(node.outputs[0]) if node.op_type == "Softmax" else None
        if not sizes:
            continue
        positions = sizes[int(attribute(node, "axis", -1))]
        if positions is not None and positions > MOST_POSITIONS:
            products += [reader for reader in _readers(node) if reader.op_type == "MatMul"]
    return products


def _vocabularies(nodes: list[ir.Node]) -> list[ir.Node]:
    """Products over many classes that lead to no further layer."""
    products: list[ir.Node] = []
    for node in (node for node in nodes if node.op_type in ("MatMul", "Gemm") and len(node.inputs) > 1):
        sizes, weight = dimensions(node.outputs[0]), node.inputs[1]
        if not sizes or (sizes[-1] or 0) < FEWEST_WORDS or weight is None or not is_constant(weight):
            continue
        if not any(map(_is_layer, _closure([node], _readers) - {node})):
            products.append(node)
    return products


def _holds_mask(value: ir.Value | None) -> bool:
    tensor = value.const_value if value is not None and is_constant(value) else None
    if tensor is None or tensor.dtype.numpy().kind != "f":
        return False
    with np.errstate(invalid="ignore"):
        lowest = [piece.array.min() for piece in pieces(tensor) if piece.array.size]
    return bool(lowest) and bool(np.min(lowest) <= -MASK_VALUE)


def _gated_activations(nodes: list[ir.Node]) -> list[ir.Node]:
    """Sigmoid and Mul of SiLU, HardSigmoid and Mul of HardSwish or x clip(x + 3, 0, 6) / 6, and the nodes of a GELU."""
    gates: set[ir.Node] = set()
    for node in nodes:
        if node.op_type not in GATES | {"Clip"} or node.inputs[0] is None:
            continue
        source = node.inputs[0]
        # from the gate forward to the Mul that joins it with what the gate was computed from
        path = [node]
        while len(path) <= 4 and len(following := _readers(path[-1])) == 1:
            step = following[0]
            path.append(step)
            inner = _nodes_of_gate(step, path[-2], source) if step.op_type == "Mul" else None
            if inner is not None:
                made = [source.producer(), *_producers(step)]
                gates.update(path, inner, (node for node in made if node is not None and _is_scaling(node)))
                gates.update(reader for reader in _readers(step) if _is_scaling(reader) and len(_readers(step)) == 1)
                break
            if step.op_type not in ("Add", "Mul", "Sub", "Div", "Tanh"):
                break
    return [node for node in nodes if node in gates]


def _nodes_of_gate(mul: ir.Node, gate: ir.Node, source: ir.Value) -> list[ir.Node] | None:
    """The nodes that compute `source` from the other operand of `mul`, or from what that was scaled from.

    None if anything but arithmetic with constants lies between. The argument of GELU's Tanh takes four nodes.
    """
    roots: set[ir.Value] = set()
    for other in mul.inputs:
        if other is not None and not is_constant(other) and other.producer() is not gate:
            producer = other.producer()
            roots.add(other)
            if producer is not None and _is_scaling(producer):
                roots.update(value for value in producer.inputs if value is not None)
    inner: list[ir.Node] = []
    pending = [source]
    while pending:
        value = pending.pop()
        if value in roots or is_constant(value):
            continue
        node = value.producer()
        if node is None or node.op_type not in ARITHMETIC or len(inner) > MOST_GATE_NODES:
            return None
        if node not in inner:
            inner.append(node)
            pending += [input_ for input_ in node.inputs if input_ is not None]
    return inner


def _is_scaling(node: ir.Node) -> bool:
    """True if the node multiplies or divides by one constant number."""
    if node.op_type not in ("Mul", "Div"):
        return False
    return any((values := constant(value)) is not None and values.size == 1 for value in node.inputs)


def _rotary_embeddings(nodes: list[ir.Node]) -> list[ir.Node]:
    """The nodes of x cos + rotated(x) sin, where half of x is negated and changes places with the other half."""
    rotary: set[ir.Node] = set()
    for total in (node for node in nodes if node.op_type == "Add"):
        products = [node for node in _producers(total) if node.op_type == "Mul"]
        for product in products:
            source, rotation = _rotation(product)
            others = [node for node in products if node is not product and source in node.inputs]
            if source is not None and others:
                rotary.update((total, product, *others, *rotation))
    return [node for node in nodes if node in rotary]


def _rotation(product: ir.Node) -> tuple[ir.Value | None, list[ir.Node]]:
    """x, and the nodes that rotate it, if the product has rotated(x) as an operand."""
    for joined in (node for node in _producers(product) if node.op_type == "Concat"):
        negations = [node for node in _producers(joined) if node.op_type == "Neg"]
        before = [*_producers(joined), *(node for negation in negations for node in _producers(negation))]
        halves = [node for node in before if node.op_type in ("Slice", "Split")]
        sources = {half.inputs[0] for half in halves}
        if negations and len(sources) == 1:
            return sources.pop(), [joined, *negations, *halves]
    return None, []


def _is_norm(node: ir.Node) -> bool:
    return node.op_type in NORMS or _is_decomposed_norm(node) or _is_norm_of_rows(node)


def _is_norm_of_rows(node: ir.Node) -> bool:
    """True for an InstanceNormalization that a rewrite made from a layer normalization, which has no operator before
    opset 17. It is followed by a Mul with a constant for each position of the last axis; without that Mul it may be a
    real instance normalization."""
    sizes = dimensions(node.outputs[0]) if node.op_type == "InstanceNormalization" else None
    if sizes is None or len(sizes) != 3:
        return False
    products = (reader for reader in _readers(node) if reader.op_type == "Mul")
    scales = (constant(value) for product in products for value in product.inputs)
    return any(scale is not None and scale.size == sizes[-1] == scale.shape[-1] != 1 for scale in scales)


def _is_decomposed_norm(node: ir.Node) -> bool:
    """True for the node that ends x / sqrt(mean(x^2) + e), with or without the mean of x taken away. The quotient may
    be a product with Reciprocal, with 1 / root, or with the power -1/2, each times a gain."""
    if node.op_type == "Div" and len(node.inputs) == 2:
        return _is_root_of_mean(_without_cast(node.inputs[1]), 0.5)
    if node.op_type != "Mul":
        return False
    for value in map(_without_gain, map(_without_cast, node.inputs)):
        inverse = made_by(value, "Reciprocal")
        quotient = made_by(value, "Div")
        if inverse is not None and _is_root_of_mean(inverse.inputs[0], 0.5):
            return True
        if quotient is not None and scalar(quotient.inputs[0]) == 1 and _is_root_of_mean(quotient.inputs[1], 0.5):
            return True
        if _is_root_of_mean(value, -0.5):
            return True
    return False


def _is_root_of_mean(value: ir.Value | None, exponent: float) -> bool:
    """True for (mean + e)^exponent."""
    root, power = made_by(value, "Sqrt"), made_by(value, "Pow")
    if root is None and power is not None and scalar(power.inputs[1]) == exponent:
        root = power
    elif exponent != 0.5:
        root = None
    added = None if root is None else made_by(root.inputs[0], "Add")
    return added is not None and any(map(_is_of_means, added.inputs))


def _is_of_means(value: ir.Value | None) -> bool:
    """True for a mean, and for what is computed from means and constants alone: mean(x^2) - mean(x)^2, a sum times 1/n.
    It keeps its dimension, or gets it back."""
    pending, means, count = [(value, False)], 0, 0
    while pending and count <= MOST_MEAN_NODES:
        value, has_shape = pending.pop()
        if value is None or is_constant(value):
            continue
        node = value.producer()
        if node is None:
            return False
        count += 1
        if node.op_type in REDUCTIONS:
            if not (has_shape or attribute(node, "keepdims", 1)):
                return False
            means += 1
        elif node.op_type in ("Reshape", "Expand", "Unsqueeze"):
            pending.append((node.inputs[0], True))
        elif node.op_type in ("Cast", "Max", "Clip", "Relu") or node.op_type in ARITHMETIC:
            pending += [(input_, has_shape) for input_ in node.inputs]
        else:
            return False
    return means > 0 and not pending


def _without_gain(value: ir.Value | None) -> ir.Value | None:
    """What a product with a constant was computed from: the gain may come before the product with x."""
    product = made_by(value, "Mul")
    rest = [] if product is None else [input_ for input_ in product.inputs if input_ is None or not is_constant(input_)]
    return rest[0] if len(rest) == 1 else value


def _without_cast(value: ir.Value | None) -> ir.Value | None:
    cast = made_by(value, "Cast")
    return value if cast is None else cast.inputs[0]


def _audio_front_end(nodes: list[ir.Node]) -> list[ir.Node]:
    """Everything before a logarithm in the middle of a network: few layers, or any number without an activation;
    everything before the logarithm of squares without an activation, also at the end, as of a network that computes
    nothing but features; and everything before the magnitudes of a spectrum, if there is no activation."""
    front_end: set[ir.Node] = set()
    for node in nodes:
        if node.op_type != "Log" and not _is_magnitude(node):
            continue
        before = _closure([node], _producers)
        behind = _closure([node], _readers)
        layers_behind = sum(map(_is_layer, behind))
        is_linear = not any(producer.op_type in ACTIVATIONS for producer in before)
        is_spectrum = is_linear and (layers_behind > 0 or (node.op_type == "Log" and any(map(_is_square, before))))
        if is_spectrum or (node.op_type == "Log" and sum(map(_is_layer, before)) < layers_behind):
            front_end |= before
    return [node for node in nodes if node in front_end]


def _is_magnitude(node: ir.Node) -> bool:
    """True for sqrt(x^2 + y^2), with or without a small constant added."""
    total = made_by(node.inputs[0], "Add") if node.op_type == "Sqrt" else None
    if total is not None and any(map(is_constant, total.inputs)):
        total = next((producer for producer in _producers(total) if producer.op_type == "Add"), None)
    return total is not None and all(squared(input_) is not None for input_ in total.inputs)


def _is_square(node: ir.Node) -> bool:
    return node.op_type in ("ReduceSumSquare", "ReduceL2") or any(squared(value) is not None for value in node.outputs)


def _has_constant_operand(node: ir.Node) -> bool:
    """True for arithmetic of a tensor with a constant; the bias of a product belongs to the product."""
    if node.op_type not in ("Add", "Sub", "Mul", "Div") or not any(is_constant(value) for value in node.inputs):
        return False
    return not (node.op_type == "Add" and any(producer.op_type in PRODUCTS for producer in _producers(node)))


def _has_no_kernel(node: ir.Node) -> bool:
    if node.op_type in ("PRelu", "ConvTranspose"):
        return True
    return node.op_type == "Resize" and attribute(node, "mode", "nearest") != "nearest"
