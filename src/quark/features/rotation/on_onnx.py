"""Rotation of an ONNX model, folded into the weights on both sides or carried out at inference.

With R orthogonal, what the writers of a tensor compute becomes x R, and its readers undo it:

    writers   W R for their weights [inputs, channels], b R for their biases, E R for an embedding
    norm      its scale goes into the readers' weights and its bias into their biases, so that it commutes with R
    readers   R' W

The network computes the same, as long as a tensor that is rotated is rotated by all nodes that write it and undone by
all that read it. That is checked by running both networks.

    R1   the residual stream (streams.py), or the pairs of layers that the user's file names
    R2   the values of attention, head by head (attention.py, heads.py)
    R3   queries and keys, at inference
    R4   the inputs of the down projections, at inference
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice

import numpy as np
import onnx_ir as ir

from quark.account import AlgorithmFacts
from quark.compare.measures import pair_sums
from quark.decide.selection import select_nodes
from quark.decide.view import Graph, Node, Value
from quark.errors import InvalidValueError, ModelError, unknown_name
from quark.features.rotation.attention import Attention, find_attention, find_down_projections, find_layers
from quark.features.rotation.edits import NAME, Edits, Online, not_rotated, weight_place
from quark.features.rotation.heads import Heads, find_heads
from quark.features.rotation.matrices import Array, factors, rotate, rotation
from quark.features.rotation.options import USUAL_SIZE, RotatedPair, RotationOptions
from quark.features.rotation.streams import NORMS, Gain, Stream, channels_of, find_streams, width
from quark.onnx.calibrate import FloatRunner
from quark.onnx.deciding import Work
from quark.onnx.graph import bypass, constant, dimensions, input_value, is_float, readers, remove_dead, set_constant
from quark.onnx.view import view_of
from quark.plan import SkippedNode
from quark.text import get_logger

LEAST_SQNR_DB = 60.0  # of the rotated network in float32, relative to the original one
LEAST_SQNR_DB_HALF = 35.0  # in float16
CHECKED_SAMPLES = 2

_log = get_logger(__name__)


def before_calibration(work: Work, options: RotationOptions) -> list[AlgorithmFacts]:
    """Rotate the model in place."""
    if options.pairs:
        _check_pairs(work.model, options)  # before a matrix of that size is made
    samples = list(islice(work.samples, CHECKED_SAMPLES)) or list(work.samples.held_out[:CHECKED_SAMPLES])
    before = _outputs(work, samples)
    rotating = _Rotating(work, options, samples)
    rotating.apply()
    worst = min(
        (
            pair_sums(old[name], new[name]).sqnr_db - _least_sqnr(old[name])
            for old, new in zip(before, _outputs(work, samples), strict=True)
            for name in old
        ),
        default=0.0,
    )
    if worst < 0:
        raise _changed_function(options, worst + LEAST_SQNR_DB)
    return [AlgorithmFacts(NAME, tuple(rotating.edits.changed), tuple(rotating.left))]


def _least_sqnr(array: Array) -> float:
    return LEAST_SQNR_DB if array.dtype.itemsize >= 4 else LEAST_SQNR_DB_HALF


def _changed_function(options: RotationOptions, sqnr_db: float) -> InvalidValueError:
    if options.pairs:
        return InvalidValueError(
            f"rotation config '{options.source}': the rotated network differs (SQNR {sqnr_db:.1f} dB). "
            "Every node that writes a rotated tensor belongs to prev_nodes, and every node that reads one to next_nodes"
        )
    return InvalidValueError(
        f"include_rotation: the rotated network differs (SQNR {sqnr_db:.1f} dB), so the graph has a "
        "form that is not understood. Turn the rotations off one by one (R1, R2, R3, R4), or name the nodes in a file "
        "(RConfigPath)"
    )


def _outputs(work: Work, samples: Iterable[dict[str, Array]]) -> list[dict[str, Array]]:
    names = _compared(work.model)
    with FloatRunner(work.model, names, providers=work.settings.calibrate.providers) as runner:
        return [
            {name: tensor.array.copy() for name, tensor in runner.tensors(sample, names).items()} for sample in samples
        ]


def _compared(model: ir.Model) -> list[str]:
    """The float outputs of a network; if it has none, the float tensors that its outputs are found from."""
    ends = [value for value in model.graph.outputs if is_float(value)]
    if ends:
        return [str(value.name) for value in ends if value.producer() is not None]
    compared, left, seen = [], list(model.graph.outputs), set()
    while left:
        value = left.pop()
        producer = value.producer()
        if producer is None or value in seen:
            continue
        seen.add(value)
        if is_float(value):
            compared.append(str(value.name))
        else:
            left += [input_ for input_ in producer.inputs if input_ is not None]
    return compared


class _Rotating:
    """All rotations of one model, one after the other; each looks at the graph as the one before it left it."""

    def __init__(self, work: Work, options: RotationOptions, samples: Sequence[dict[str, Array]]) -> None:
        self.work, self.options, self.samples = work, options, samples
        self.edits = Edits(work.model)
        self.left: list[SkippedNode] = []
        self.rotated_heads: set[str] = set()  # layers that R2 has rotated at their input

    def apply(self) -> None:
        """Carry out what the options ask for. Raises ModelError if nothing can be rotated."""
        options = self.options
        if options.pairs:
            self._rotate_pairs()
        elif options.r1 and not options.is_online:
            self._rotate_streams()
        if options.has_r2:
            self._rotate_values()
        if options.r3:
            self._rotate_queries()
        if options.r4 or options.is_online:
            self._rotate_inputs()
        if not self.edits.changed:
            reasons = "; ".join(dict.fromkeys(f"{skipped.node}: {skipped.reason}" for skipped in self.left[:3]))
            raise ModelError(f"include_rotation: nothing can be rotated. {reasons or 'No layers were found for it'}")

    # -- R1

    def _rotate_pairs(self) -> None:
        """Rotate what the user's file names. A weight that several pairs name is rotated once on each side."""
        nodes = {str(node.name): node for node in self.work.model.graph}
        norms = (nodes[pair.norm].op_type for pair in self.options.pairs if pair.norm)
        matrix = self._matrix(self.options.size or USUAL_SIZE, keeps_mean="LayerNormalization" in norms)
        done: set[tuple[str, bool]] = set()
        for pair in self.options.pairs:
            if pair.norm is not None:
                self._fold_norm(nodes[pair.norm], [nodes[name] for name in pair.readers])
            for is_output, names in ((True, pair.writers), (False, pair.readers)):
                for name in names:
                    if (name, is_output) in done:
                        continue
                    done.add((name, is_output))
                    if is_output:
                        self.edits.rotate_output(nodes[name], matrix, channels=_pair_size(self.options))
                    else:
                        self.edits.rotate_input(nodes[name], matrix)

    def _fold_norm(self, norm: ir.Node, following: list[ir.Node]) -> None:
        """Move scale and bias of a normalization into the nodes behind it."""
        if norm.op_type not in NORMS:
            raise ModelError(f"norm_node '{norm.name}' is of type {norm.op_type}: expected one of {', '.join(NORMS)}")
        behind = {str(reader.name) for reader, _ in readers(norm.outputs[0])}
        if behind != {str(node.name) for node in following}:
            raise ModelError(
                f"norm_node '{norm.name}' is read by {', '.join(sorted(behind))}: next_nodes must be exactly these"
            )
        scale, bias = constant(input_value(norm, 1)), constant(input_value(norm, 2))
        if scale is None or (input_value(norm, 2) is not None and bias is None):
            raise ModelError(f"norm_node '{norm.name}': its scale or its bias is computed, and cannot be folded")
        if np.all(scale == 1) and (bias is None or not bias.any()):
            return
        for node in following:
            self.edits.fold_gain(node, scale, bias)
        set_constant(self.work.model, norm, 1, np.ones_like(scale))
        if bias is not None:
            set_constant(self.work.model, norm, 2, np.zeros_like(bias))

    def _rotate_streams(self) -> None:
        """Rotate every residual stream that can be found."""
        streams = find_streams(view_of(self.work.model))
        size, block = self.options.size, self.options.block
        for stream in streams:
            reason = ""
            if size is not None and stream.size != size:
                reason = f"it has {stream.size} channels, and RMatrixDim is {size}"
            elif block is not None and stream.size % block:
                reason = f"RotationSize = {block} does not divide its {stream.size} channels"
            elif not stream.is_worthwhile:
                reason = f"it cannot be rotated: {stream.obstacle or 'no layers write or read it'}"
            if reason:
                self._leave("residual stream", stream.values[0], reason)
            else:
                self._rotate_stream(stream)
        if not streams:
            self.left.append(SkippedNode("residual stream", "", "the network has no normalization"))
        elif not self.edits.changed:
            _log.warning("rotation R1: no residual stream is rotated. %s", self.left[-1].reason)

    def _rotate_stream(self, stream: Stream) -> None:
        matrix = self._matrix(self.options.block or stream.size, keeps_mean=stream.needs_mean)
        for gain in stream.gains:
            self._fold(gain)
        for node, index in stream.constants:
            self.edits.edit(node.origin, index, partial(rotate, matrix=matrix))
        for node in stream.writers:
            self.edits.rotate_output(node.origin, matrix)
        for node in stream.readers:
            self.edits.rotate_input(node.origin, matrix)
        for value, places in stream.entries.items():
            self.edits.insert(value.origin, _origins(places), Online(matrix), f"{value.name}_rotation", stream.size)
            self.edits.changed.append(f"{value.name}: a product behind it")
        for value, places in stream.exits.items():
            insert = self.edits.insert_for_all if value.outputs else self.edits.insert
            insert(value.origin, _origins(places), Online(matrix.T), f"{value.name}_rotation", stream.size)
            self.edits.changed.append(f"{value.name}: a product behind it")
        for gain in stream.gains:
            if not gain.is_norm and gain.layers:
                for node in (gain.node, *(adder for adder, _ in gain.constants if gain.is_forward)):
                    bypass(node.origin, _data_of(node.origin))
        remove_dead(self.work.model)

    def _fold(self, gain: Gain) -> None:
        """Move one factor per channel into layers."""
        model, node = self.work.model, gain.node.origin
        factor = constant(input_value(node, gain.factor))
        if gain.is_trivial or factor is None:
            return
        flat = factor.reshape(-1)
        if not gain.is_forward:
            for layer in gain.layers:
                self.edits.edit_weight(layer.origin, lambda w: w * flat.astype(np.float64), flat.size)
                place = self.edits.bias_place(layer.origin)
                if place is not None:
                    self.edits.edit(*place, lambda b: b * flat.astype(np.float64))
            for other, index in gain.constants:
                self.edits.edit(other.origin, index, lambda values: values * flat.astype(np.float64))
            return
        shifts = [] if gain.shift is None else [(node, gain.shift)]
        shifts += [(other.origin, index) for other, index in gain.constants]
        shift = None
        for other, index in shifts:
            values = constant(input_value(other, index))
            assert values is not None
            shift = values.reshape(-1).astype(np.float64) + (0.0 if shift is None else shift)
        for layer in gain.layers:
            self.edits.fold_gain(layer.origin, flat, shift)
        if gain.is_norm:
            set_constant(model, node, gain.factor, np.ones_like(factor))
            if gain.shift is not None:
                set_constant(model, node, gain.shift, np.zeros_like(factor))

    # -- R2, R3, R4

    def _rotate_values(self) -> None:
        """Rotate what every head of attention computes from its values."""
        attentions = find_attention(view_of(self.work.model))
        if not attentions:
            self.left.append(SkippedNode("attention", "", "R2: no MatMul of probabilities and values is found"))
        sample = self.samples[0] if self.samples else None
        for attention, heads in find_heads(self.work, attentions, sample):
            if isinstance(heads, str):
                self.left.append(SkippedNode(attention.product.label, attention.product.op_type, f"R2: {heads}"))
            else:
                self._rotate_heads(attention, heads)

    def _rotate_heads(self, attention: Attention, heads: Heads) -> None:
        matrix = rotation(heads.size, is_random=self.options.is_random)
        assert attention.writer is not None
        writer, change = attention.writer.origin, partial(heads.rotate_values, matrix=matrix)
        self.edits.edit_weight(writer, change, heads.size)
        place = self.edits.bias_place(writer)
        if attention.bias is not None:
            place = attention.bias[0].origin, attention.bias[1]
        if place is not None:
            self.edits.edit(*place, change)
        self.edits.changed.append(f"{writer.name}: its output by heads")
        for node, channels in heads.outputs:
            undo = partial(heads.rotate_rows, matrix=matrix, channels=channels)
            self.edits.edit_weight(node.origin, undo, heads.size)
            self.edits.changed.append(f"{node.label}: its input by heads")
            self.rotated_heads.add(node.name)

    def _rotate_queries(self) -> None:
        """Rotate queries and keys at inference."""
        for attention in find_attention(view_of(self.work.model)):
            scores = attention.scores
            size = None if scores is None else width(scores.input(0))
            if scores is None or size is None:
                reason = "R3: the product of queries and keys is not found, or its number of channels is not known"
                self.left.append(SkippedNode(attention.product.label, attention.product.op_type, reason))
                continue
            matrix = rotation(size, is_random=self.options.is_random)
            query = scores.origin.inputs[0]
            self.edits.insert(query, [(scores.origin, 0)], Online(matrix), f"{scores.name}_query_rotation", size)
            self.edits.insert_left(scores.origin, 1, matrix.T, f"{scores.name}_key_rotation")
            self.edits.changed.append(f"{scores.name}: its queries and keys")

    def _rotate_inputs(self) -> None:
        """Rotate the inputs of down projections, and of the layers that read the residual stream, at inference."""
        graph = view_of(self.work.model)
        down = find_down_projections(graph, find_attention(graph))
        wanted = self._online_layers(graph, down)
        by_tensor: dict[Value, list[Node]] = {}
        for node in wanted:
            data = node.input(0)
            size, block = channels_of(node, of_input=True), self.options.block
            if size is None or data is None or data.rank is None:
                self._leave(node.op_type, node.outputs[0], "the shape of its input is not known", node.label)
            elif block is not None and size % block:
                reason = f"RotationSize = {block} does not divide its {size} input channels"
                self._leave(node.op_type, node.outputs[0], reason, node.label)
            else:
                by_tensor.setdefault(data, []).append(node)
        for data, nodes in by_tensor.items():
            channels = channels_of(nodes[0], of_input=True)
            assert channels is not None
            left, matrix = factors(self.options.block or channels)
            online = Online(matrix, left)
            places = [(node.origin, 0) for node in nodes]
            self.edits.insert(data.origin, places, online, f"{nodes[0].name}_rotation", channels)
            for node in nodes:
                self.edits.rotate_input(node.origin, online.product)
        if self.options.r4 and not down:
            self.left.append(
                SkippedNode("down projections", "", "R4: no layer reads an activation and writes to a sum")
            )

    def _online_layers(self, graph: Graph, down: Sequence[Node]) -> list[Node]:
        """The layers whose input is rotated at inference; those that stay in float are left alone."""
        nodes = set(down) if self.options.r4 else set()
        if self.options.is_online:
            others = (node for node in find_layers(graph) if node not in down)
            nodes |= {node for node in others if node.name not in self.rotated_heads}
        choose = self.work.settings.choose
        selection = choose.selection
        named = [*selection.nodes, *selection.excluded_nodes, *(pattern for pattern, _ in choose.by_node)]
        chosen, _ = select_nodes(graph, choose, vanished=named)
        return [node for node in graph if node in nodes and node.name in chosen]

    def _matrix(self, size: int, *, keeps_mean: bool) -> Array:
        return rotation(size, is_random=self.options.is_random, keeps_mean=keeps_mean)

    def _leave(self, kind: str, value: Value, reason: str, name: str = "") -> None:
        self.left.append(SkippedNode(name or f"{kind} '{value.name}'", kind, reason))


def _origins(places: Iterable[tuple[Node, int]]) -> list[tuple[ir.Node, int]]:
    return [(node.origin, index) for node, index in places]


def _data_of(node: ir.Node) -> ir.Value | None:
    """The operand that is not a constant."""
    return next((value for value in node.inputs if value is not None and constant(value) is None), None)


def _pair_size(options: RotationOptions) -> int:
    return options.size or USUAL_SIZE


def _check_pairs(model: ir.Model, options: RotationOptions) -> None:
    """Raise an error if a node is missing, or a weight of a pair has another number of channels."""
    nodes = {str(node.name): node for node in model.graph}
    for name in (name for pair in options.pairs for name in (*pair.writers, *pair.readers, pair.norm or "")):
        if name and name not in nodes:
            raise unknown_name(f"node (rotation config '{options.source}')", name, nodes)
    for pair in options.pairs:
        _check_sizes(pair, nodes, _pair_size(options))


def _check_sizes(pair: RotatedPair, nodes: dict[str, ir.Node], size: int) -> None:
    for axis, names in ((-1, pair.writers), (-2, pair.readers)):
        for node in (nodes[name] for name in names):
            index, is_transposed = weight_place(node)
            dims = dimensions(input_value(node, index)) or ()
            if len(dims) < 2 or (dims[::-1] if is_transposed else dims)[axis] != size:
                raise not_rotated(node, dims, size)
