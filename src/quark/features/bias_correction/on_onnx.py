"""Correct each bias by the mean error that rounding makes in its layer.

    b' = b + E[y_float - y_quantized]     for each output channel

E is the mean over positions, and over samples the mean of the middle half: a few samples with a value far outside the
range would otherwise decide the bias of all others.

Both outputs are computed from the float network's activations, so that only the layer's own rounding counts, of its
input and of its weights. The mean of y over positions is linear in the taps of `taps.py`: with x the input, e the error
of its rounding, w and v the float and the rounded weights,

    E[y_float - y_quantized] = sum of (w - v) * E[x] - v * E[e]

so that a pass over the samples only has to keep a few sums for each channel and sample. Biases of few bits are off
themselves, and the layers behind them make up for that: `shifts.py`.

`CorrectionInputs.QUANTIZED` then follows the quantized network layer by layer: the mean output of a layer, computed
from what the layers before it made of the samples, is compared with the float network, and its bias is moved before the
next layer is looked at. That also undoes the errors of earlier layers, and overcorrects residual networks, where no
bias controls the sums on the identity path. So the result is kept only if it brings the network's outputs on held-out
samples closer to the float network's.

In a network with MatMul the corrections are kept on that condition too: all of them, or else each quarter of the
layers, in their order, that brings the outputs closer. The rows of a product are unlike each other: what is right for
the mean of all tokens shifts a class token by more than its rounding did, and a normalization behind it enlarges the
difference.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.account import AlgorithmFacts
from quark.compare.improvement import OutputErrors
from quark.compare.measures import relative_error_of, squared_sums
from quark.decide.view import Node
from quark.errors import InvalidValueError
from quark.features.bias_correction.layers import (
    LAYER_TYPES,
    NAME,
    Layer,
    bias_place,
    corrected_layers,
    middle_mean,
    output_channels,
    phrase,
)
from quark.features.bias_correction.options import BiasCorrectionOptions, CorrectionInputs
from quark.features.bias_correction.shifts import Shifts, bounds_of, is_coarse, pooled_activations
from quark.features.bias_correction.taps import Taps, mean_products, tap_sums, taps_of
from quark.onnx.blas_threads import one_blas_thread
from quark.onnx.calibrate import survey
from quark.onnx.deciding import Decision, State, Work, quantized_errors
from quark.onnx.graph import (
    add_initializer,
    constant,
    input_value,
    is_read_once,
    replace_input,
    set_constant,
)
from quark.onnx.insert import InsertOptions, insert
from quark.onnx.progress import track
from quark.onnx.save import SaveOptions, finish
from quark.onnx.session import open_session, release_memory, running
from quark.onnx.view import view_of
from quark.plan import Choice, QuantizationPlan, Reader, Role, SkippedNode
from quark.rounded import rounded

Array = NDArray[Any]
Sample = Mapping[str, Array]
FOLLOWING = "bias correction from the quantized network"
QUARTERS = 4


def before_calibration(work: Work, options: BiasCorrectionOptions) -> tuple[AlgorithmFacts, ...]:
    """Give layers a bias to hold their correction."""
    if not work.samples.is_random:
        give_biases(work.model)
    return ()


def watched(work: Work, options: BiasCorrectionOptions) -> list[str]:
    """The inputs of layers with constant weights, and what their biases are added to if that is compared."""
    if work.samples.is_random:
        return []
    graph = view_of(work.model)
    nodes = [node for node in graph if node.op_type in LAYER_TYPES and node.is_standard]
    nodes = [node for node in nodes if (weight := node.input(1)) is not None and weight.constant is not None]
    names = [value.name for node in nodes if (value := node.input(0)) is not None and value.constant is None]
    names += [value.name for value in pooled_activations(graph)]
    if options.inputs is CorrectionInputs.QUANTIZED:
        places = (bias_place(node, _obstacle) for node in nodes)
        names += [place[0].outputs[0].name for place in places if not isinstance(place, str)]
    return list(dict.fromkeys(names))


def after_choosing(work: Decision, options: BiasCorrectionOptions) -> list[AlgorithmFacts]:
    """Correct the biases of the float model in place, and choose new scales for them.

    A feature before this one may have tried it already, to judge what it did itself: the result is remembered.
    """
    if work.samples.is_random or not work.samples.count:
        reason = "no calibration data was given, and the mean of random numbers corrects nothing"
        return [AlgorithmFacts(NAME, (), (SkippedNode("", "", reason),))]
    known: list[tuple[State, State, list[AlgorithmFacts]]] = work.measured.setdefault((NAME, options), [])
    before = work.state
    for earlier, corrected, facts in known:
        if earlier.is_same(before):
            work.restore(corrected)
            return facts
    facts = _correct_in_place(work, options)
    known.append((before, work.state, facts))
    return facts


@one_blas_thread()
def _correct_in_place(work: Decision, options: BiasCorrectionOptions) -> list[AlgorithmFacts]:
    plan, positions = work.plan, work.positions
    is_guarded = bool(work.expected) and any(node.op_type == "MatMul" for node in work.model.graph)
    before = quantized_errors(work) if is_guarded else OutputErrors()
    corrected, left, means = _correct(work, options)
    facts = [AlgorithmFacts(NAME, tuple(correction.phrase for correction in corrected), tuple(left))]
    changed = frozenset(correction.tensor for correction in corrected)
    if options.inputs is CorrectionInputs.QUANTIZED:
        followed, also = _follow(work, options)
        facts, changed = [*facts, followed], changed | also
    work.rechoose(changed)
    _make_up_for_rounding(work, means)
    if not is_guarded or quantized_errors(work).is_no_worse_than(before):
        return facts
    kept = _best_quarters(work, corrected, (plan, positions), before)
    reason = "the outputs on held-out samples got worse with it"
    left += [SkippedNode(correction.layer, "", reason) for correction in corrected if correction not in kept]
    return [AlgorithmFacts(NAME, tuple(correction.phrase for correction in kept), tuple(left))]


@dataclass(frozen=True, eq=False)
class _Corrected:
    """A bias that was corrected: its layer and tensor, what it held before, and what was done, in words."""

    layer: str
    tensor: str
    before: ir.TensorProtocol | None
    phrase: str


def _best_quarters(
    work: Decision,
    corrected: Sequence[_Corrected],
    earlier: tuple[QuantizationPlan, AlgorithmFacts | None],
    errors: OutputErrors,
) -> list[_Corrected]:
    """Undo the corrections, except for those quarters of them that lower the error of the outputs. `earlier` are plan
    and positions from before, and `errors` those with them. Returns the corrections that are left."""
    values = work.model.graph.initializers
    new = {correction.tensor: values[correction.tensor].const_value for correction in corrected}

    def apply(chosen: Sequence[_Corrected]) -> None:
        for correction in corrected:
            values[correction.tensor].const_value = (
                new[correction.tensor] if correction in chosen else correction.before
            )
        work.plan, work.positions = earlier
        if chosen:
            work.rechoose([correction.tensor for correction in chosen])

    kept: list[_Corrected] = []
    size = max(1, -(-len(corrected) // QUARTERS))
    for start in range(0, len(corrected), size):
        tried = [*kept, *corrected[start : start + size]]
        apply(tried)
        current_errors = quantized_errors(work)
        if current_errors.mean < errors.mean and current_errors.is_no_worse_than(errors):
            kept, errors = tried, current_errors
    apply(kept)
    return kept


def give_biases(model: ir.Model) -> None:
    """Give every Conv, ConvTranspose and Gemm a constant bias of its own, zeros if it had none."""
    for node in view_of(model):
        if node.op_type not in LAYER_TYPES[:3] or not node.is_standard:
            continue
        weight, bias = constant(input_value(node.origin, 1)), input_value(node.origin, 2)
        values = constant(bias)
        if weight is None or _obstacle(node) or (bias is not None and (values is None or is_read_once(bias))):
            continue
        own = np.zeros(output_channels(node, weight.shape), weight.dtype) if values is None else values.copy()
        replace_input(node.origin, 2, add_initializer(model, f"{node.name}_bias", own))


def _weights(node: Node) -> Array:
    value = node.inputs[1]
    assert value is not None
    assert value.constant is not None
    return value.constant.array()


def _taps(layer: Layer) -> Taps:
    weight = constant(layer.node.origin.inputs[1])
    taps = None if weight is None else taps_of(layer.node.origin, weight)
    assert taps is not None, layer.name
    return taps


def _obstacle(node: Node) -> str | None:
    """The reason why the mean of the node's output does not follow from a few sums of its input; None if it does."""
    weight = constant(node.origin.inputs[1])
    if weight is None or taps_of(node.origin, weight) is not None:
        return None
    return "the shape of its output is given, not computed" if node.op_type == "ConvTranspose" else "many matrices"


def _layers(model: ir.Model, plan: QuantizationPlan) -> tuple[list[Layer], list[SkippedNode]]:
    choices = {reader: entry.choice for entry in plan for reader in entry.readers}
    return corrected_layers(view_of(model), choices, _obstacle)


def _channel_means(layer: Layer, x: Array) -> Array:
    """The mean of an output for each row of the batch and each channel."""
    lines = np.moveaxis(x.astype(np.float64), 1 if _taps(layer).windows else -1, -1)
    return np.asarray(lines.reshape(len(lines), -1, lines.shape[-1]).mean(axis=1))


class TapMeans:
    """The mean taps of one tensor and of the error of its rounding, sample by sample, for all layers that read it."""

    is_mergeable = True

    def __init__(self, wanted: list[tuple[Taps, Choice | None]], bounds: tuple[float, float] | None = None) -> None:
        """`bounds` are those of the Relu or Clip that computes the tensor."""
        self._means: dict[tuple[Taps, Choice | None], list[tuple[Array, Array]]] = {key: [] for key in wanted}
        self._bounds = bounds
        self._within: list[Array] = []
        self._shape: tuple[int, ...] = ()

    def observe(self, x: Array) -> None:
        x = x.astype(np.float32, copy=False)
        self._shape = x.shape
        if self._bounds is not None and x.ndim > 1:
            lowest, highest = self._bounds
            is_within = (x > lowest) & (x < highest) if highest < np.inf else x > lowest
            self._within.append(is_within.mean(axis=tuple(axis for axis in range(x.ndim) if axis != 1)))
        for key, sums in tap_sums(x, self._means):
            if not np.isfinite(sums.values).all():
                raise InvalidValueError("has NaN or Inf")
            count = np.float32(max(sums.positions, 1))
            self._means[key].append((sums.values / count, sums.errors / count))

    def end_of_sample(self) -> None:
        pass

    def merge(self, other: TapMeans) -> None:
        for key, pairs in other._means.items():
            self._means[key] += pairs
        self._within += other._within
        self._shape = self._shape or other._shape

    def means(self, taps: Taps, choice: Choice | None) -> tuple[Array, Array]:
        """The mean taps of the tensor, and of the error, [samples, channels, *kernel]."""
        pairs = self._means[taps, choice]
        return np.concatenate([exact for exact, _ in pairs]), np.concatenate([quantized for _, quantized in pairs])

    def share_within(self) -> Array | None:
        """The share of positions strictly within the bounds, by channel; None without bounds."""
        return np.mean(self._within, axis=0) if self._within else None

    def taps_of_shift(self, taps: Taps, shift: Array) -> Array:
        """The mean taps [1, channels, *kernel] of a tensor that is `shift` in every position."""
        if not taps.windows:
            return shift[None]
        sums, positions = taps.sums(np.ones((1, 1, *self._shape[2:]), np.float32))
        return np.asarray(shift.reshape(1, -1, *[1] * len(taps.windows)) * sums / max(positions, 1))


def _correct(
    work: Decision, options: BiasCorrectionOptions
) -> tuple[list[_Corrected], list[SkippedNode], Mapping[str, TapMeans]]:
    """Correct biases from the float network's activations; also returns the layers that were left out, and what was
    measured, by tensor."""
    layers, left = _layers(work.model, work.plan)
    key, statistics = _statistics(work, options, layers)
    if key not in work.measured:
        work.measured[key] = survey(
            work.runner,
            statistics,
            work.samples,
            work.settings.calibrate,
            sample_limit=options.sample_limit,
            title="correcting biases",
        )
        work.runner.rest()
    means: Mapping[str, TapMeans] = work.measured[key]
    changed: list[_Corrected] = []
    # an earlier feature may have rounded the weights
    originals = {} if work.exact is None else view_of(work.exact).by_name
    for layer in layers:
        exact = _weights(originals.get(layer.node.name, layer.node))
        correction = mean_error(layer, exact, *means[layer.input].means(_taps(layer), layer.data))
        bias = layer.bias.array()
        assert bias is not None, layer.name
        with np.errstate(over="ignore"):
            corrected = (bias.astype(np.float64) + correction).astype(bias.dtype)
        if not np.isfinite(corrected).all():
            left.append(layer.skipped(f"the correction is beyond {bias.dtype}"))
            continue
        before = layer.adder.origin.inputs[layer.bias_index].const_value
        tensor = str(set_constant(work.model, layer.adder.origin, layer.bias_index, corrected).name)
        changed.append(_Corrected(layer.name, tensor, before, phrase(layer, correction)))
    return changed, left, means


def _statistics(
    work: Decision, options: BiasCorrectionOptions, layers: Sequence[Layer]
) -> tuple[Hashable, dict[str, TapMeans]]:
    """The empty statistics that correction needs of the tensors read by these layers, and their key in
    `Decision.measured`."""
    by_tensor: dict[str, list[tuple[Taps, Choice | None]]] = {}
    bounds: dict[str, tuple[float, float] | None] = {}
    for layer in layers:
        by_tensor.setdefault(layer.input, []).append((_taps(layer), layer.data))
        value = layer.node.inputs[0]
        bounds[layer.input] = bounds_of(None if value is None else value.producer)
    if any(is_coarse(entry.choice) for entry in work.plan if entry.role is Role.BIAS):
        for value in pooled_activations(view_of(work.model)):
            by_tensor.setdefault(value.name, [])
            bounds[value.name] = bounds_of(value.producer)
    else:
        bounds.clear()
    key = (NAME, options.sample_limit, *((name, bounds.get(name), *wanted) for name, wanted in by_tensor.items()))
    return key, {name: TapMeans(wanted, bounds.get(name)) for name, wanted in by_tensor.items()}


def unmeasured(work: Decision, options: BiasCorrectionOptions) -> dict[str, TapMeans]:
    """Return the statistics of the float network that correction uses, by tensor. A feature that runs that network
    anyway fills them in from `options.sample_limit` samples, so that correction need not run it again. Empty if they
    are known already."""
    key, statistics = _statistics(work, options, _layers(work.model, work.plan)[0])
    return {} if key in work.measured else work.measured.setdefault(key, statistics)


def _make_up_for_rounding(work: Decision, means: Mapping[str, TapMeans]) -> None:
    """Compensate, in each layer, the shift that rounding the biases before it causes. Scales stay as they are: the
    compensation is a small part of a step, and a bias near the end of its range is rounded as it would be
    without it."""
    choices = {reader: entry.choice for entry in work.plan for reader in entry.readers if entry.role is Role.BIAS}
    if not any(map(is_coarse, choices.values())):
        return
    shares = {name: share for name, tap_means in means.items() if (share := tap_means.share_within()) is not None}
    shifts = Shifts(shares)
    for layer in _layers(work.model, work.plan)[0]:
        bias, choice = layer.bias.array(), choices.get(Reader(layer.adder.name, layer.bias_index))
        assert bias is not None, layer.name
        shift, wanted = shifts.of(layer.node.inputs[0]), bias.astype(np.float64)
        if shift is not None and layer.input in means:
            taps = means[layer.input].taps_of_shift(_taps(layer), shift)
            wanted = wanted - mean_products(layer.node.origin, layer.weights().astype(np.float64), taps)[0]
            set_constant(work.model, layer.adder.origin, layer.bias_index, wanted.astype(bias.dtype))
        if is_coarse(choice) and choice is not None:
            shifts.left[layer.output] = rounded(wanted.astype(np.float32), choice) - wanted


def mean_error(layer: Layer, exact: Array, values: Array, errors: Array) -> Array:
    """y_float - y_quantized of each output channel: the mean over positions, the mean of the middle half of samples.

    `exact` are the weights of the float network.
    """
    exact, seen = exact.astype(np.float32), layer.weights().astype(np.float32)
    seen = seen if layer.weight is None else rounded(seen, layer.weight)
    of_samples = mean_products(layer.node.origin, exact - seen, values)
    of_samples = of_samples - mean_products(layer.node.origin, seen, errors)
    return middle_mean(of_samples)


def _follow(work: Decision, options: BiasCorrectionOptions) -> tuple[AlgorithmFacts, frozenset[str]]:
    """Correct biases from the quantized network's activations, layer by layer, if that helps; also returns the names of
    the constants that changed."""
    model, held_out = work.model, work.samples.held_out
    layers, left = _layers(model, work.plan)
    network = _OpenBiases(model, work.plan, layers, work.settings.calibrate.providers)
    seen = list(islice(work.samples, work.samples.batches(options.sample_limit)))
    before = dict(network.biases)
    try:
        error = network.output_error(held_out, work.expected)
        with track(len(layers), "following the quantized network") as advance:
            for layer in layers:
                runner = work.runner
                name = layer.output
                difference = np.concatenate(
                    [_channel_means(layer, runner.tensors(sample, [name])[name].array) for sample in seen]
                ) - network.means(seen, layer)
                network.biases[layer.name] += np.median(difference, axis=0)
                advance()
        corrected = network.output_error(held_out, work.expected)
    finally:
        network.close()
    if not corrected < error:
        reason = f"the outputs on held-out samples got worse: squared error {error:.4g} became {corrected:.4g}"
        return AlgorithmFacts(FOLLOWING, (), (*left, SkippedNode("", "", reason))), frozenset()
    changed = []
    tensors = []
    for layer in layers:
        values = network.biases[layer.name]
        _, dtype = network.inputs[layer.name]
        tensors.append(str(set_constant(model, layer.adder.origin, layer.bias_index, values.astype(dtype)).name))
        changed.append(phrase(layer, values - before[layer.name]))
    return AlgorithmFacts(FOLLOWING, tuple(changed), tuple(left)), frozenset(tensors)


class _OpenBiases:
    """The quantized network with the biases of its layers as inputs, so that one session serves all layers. A run goes
    no further than the layer that is looked at. `biases` are by layer, in float64, `inputs` their names and types."""

    def __init__(
        self, model: ir.Model, plan: QuantizationPlan, layers: Sequence[Layer], providers: Sequence[str]
    ) -> None:
        import onnxruntime

        copy = model.clone()
        nodes = {str(node.name): node for node in copy.graph}
        self.biases: dict[str, Array] = {}
        self.inputs: dict[str, tuple[str, Any]] = {}
        for layer in layers:
            value = nodes[layer.adder.name].inputs[layer.bias_index]
            values = constant(value)
            assert value is not None, layer.name
            assert values is not None, layer.name
            self.biases[layer.name] = values.astype(np.float64)
            self.inputs[layer.name] = (str(value.name), values.dtype)
            del copy.graph.initializers[str(value.name)]
            value.const_value = None
            copy.graph.inputs.append(value)
        opened = {name for name, _ in self.inputs.values()}
        rest = tuple(entry for entry in plan if entry.role is not Role.BIAS and entry.tensor not in opened)
        insert(copy, QuantizationPlan(rest), InsertOptions())
        self._outputs = {layer.name: str(nodes[layer.adder.name].outputs[0].name) for layer in layers}  # insert renames
        runnable = finish(copy, {}, SaveOptions(has_portable_functions=False)).to_graph()
        extra = list(dict.fromkeys(self._outputs.values()))
        self._session: Any = open_session(runnable, extra_outputs=extra, providers=providers)
        self._options = onnxruntime.RunOptions()
        self._options.only_execute_path_to_fetches = True

    def means(self, samples: Sequence[Sample], layer: Layer) -> Array:
        """The mean output of the layer, [samples, channels]."""
        name = self._outputs[layer.name]
        return np.concatenate([_channel_means(layer, self._run(sample, [name])[0]) for sample in samples])

    def output_error(self, samples: Sequence[Sample], expected: Sequence[Sample]) -> float:
        """The sum of squared differences of all float outputs, each output relative to its size."""
        total: dict[str, list[float]] = {}
        for sample, reference in zip(samples, expected, strict=True):
            floats = [name for name, value in reference.items() if value.dtype.kind == "f"]
            for name, value in zip(floats, self._run(sample, floats), strict=True):
                sums = total.setdefault(name, [0.0, 0.0])
                for index, square in enumerate(squared_sums(reference[name], value)):
                    sums[index] += square
        return sum(relative_error_of(error, power) for error, power in total.values())

    def close(self) -> None:
        self._session = None
        release_memory()

    def _run(self, sample: Sample, names: list[str]) -> list[Array]:
        biases = {name: self.biases[layer].astype(dtype) for layer, (name, dtype) in self.inputs.items()}
        with running("the quantized model"):
            results: list[Array] = self._session.run(names, {**sample, **biases}, self._options)
        return results
