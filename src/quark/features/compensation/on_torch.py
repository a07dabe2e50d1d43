"""Compensation of the convolutions and linear layers of a torch network, from the float network's activations.

Only weights whose scale is fixed once it is chosen: training recomputes those that follow the weight's extremes, and
moves those that are learned, and what was rounded for one scale is off the steps of another. A layer with a batch norm
gets the folded weight that is wanted divided by what folding multiplies it with.

Several processes that each see a part of the data (torchrun) add up their sums, and judge the result together.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx

from quark.account import AlgorithmFacts
from quark.compare.improvement import OutputErrors
from quark.compare.kinds import ClassesMeter
from quark.compare.parts import find_parts
from quark.decide.specs import AffineSpec
from quark.decide.view import Array
from quark.errors import UnsupportedOptionError
from quark.features.bias_correction import on_torch as bias_correction
from quark.features.bias_correction.on_torch import TorchLayer, give_biases, torch_layers
from quark.features.bias_correction.taps import Window
from quark.features.compensation.input_products import InputProducts
from quark.features.compensation.layers import CompensatedLayer, compensated_layer
from quark.features.compensation.options import CompensationOptions, LanguageCompensationOptions
from quark.features.finetuning.layers import ConvolutionRows, MatrixRows, RowSource, TrainedLayer
from quark.features.finetuning.problem import WeightLayout
from quark.onnx.blas_threads import one_blas_thread
from quark.plan import DynamicChoice, Role, SkippedNode
from quark.ranges import MinMax, NonOverflow
from quark.torch.deciding import Decision, Work
from quark.torch.decisions import Chosen
from quark.torch.graph import readers_of_parameters
from quark.torch.insert import insert
from quark.torch.observe import gathered, survey
from quark.torch.train.conv_batch_norm import CONVOLUTIONS, TRANSPOSED, ConvBatchNorm

NAME = "compensation"
JUDGED = 8  # samples at most that decide whether the result is kept; a quarter of few
CORRECTION_SAMPLES = 16  # samples for the biases of the networks that are judged

Batch = tuple[torch.Tensor, ...]
Outputs = dict[str, Array]


def before_calibration(work: Work, options: CompensationOptions) -> tuple[AlgorithmFacts, ...]:
    """Give layers a bias: `torch_layers` lists those that have one."""
    _refuse_structure(options)
    if work.batches is not None:
        give_biases(work.network)
    return ()


def _refuse_structure(options: CompensationOptions) -> None:
    """Raise for what is only carried out on language models."""
    if not isinstance(options, LanguageCompensationOptions):
        return
    usual = LanguageCompensationOptions(float_share=1.0)  # GPTQConfig
    names = ("float_share", "searches_scales", "has_compensation", "sweeps", "modules", "decoder_layers")
    if any(getattr(options, name) != getattr(usual, name) for name in names):
        raise UnsupportedOptionError(
            "GPTAQConfig, QronosConfig, SearchedScalesConfig, and the names of modules of GPTQConfig are for causal "
            "language models of Hugging Face, and this model is quantized on its graph, where layers are found; use "
            "GPTQConfig() with damp_percent and desc_act alone"
        )


@one_blas_thread()
def after_choosing(work: Decision, options: CompensationOptions) -> list[AlgorithmFacts]:
    """Round weights in place, and keep their scales. Output channels that would get worse stay as they are.

    A layer that improves by itself may still make the network worse. So both networks, with the biases that belong to
    each, are compared on samples that the weights were not moved by, and all layers are rolled back if the outputs got
    worse."""
    if work.batches is None:
        return []
    seen, judged = _split(work.batches, min(options.sample_limit, CompensationOptions.sample_limit))
    exact = copy.deepcopy(work.network)
    layers, left = _layers(work)
    wanted: dict[str, InputProducts] = {}
    for layer, trained in layers:
        wanted.setdefault(layer.input, InputProducts()).add(trained, layer.data, sum(map(_samples, seen)))
    surveyed = survey(work.network, wanted, seen, CompensationOptions.sample_limit).values()
    products = {name: sums for input_products in surveyed for name, sums in input_products.sums.items()}
    for sums in {id(sums): sums for sums in products.values()}.values():
        sums.finish()
        sums.shrink()
    expected = _outputs(exact, judged)
    before = _errors(work, judged, expected)
    standing = {name: tensor.detach().clone() for name, tensor in work.network.state_dict().items()}
    changed: list[str] = []
    for layer, trained in layers:
        weight = layer.weight_now().float().cpu().numpy()
        result = compensated_layer(trained, weight, products.pop(trained.name), options)
        if isinstance(result, CompensatedLayer):
            _write(layer, torch.from_numpy(result.weight))
            changed.append(f"{layer.name}: {result.gain}")
        else:
            left.append(layer.skipped(result))
    if not changed:
        return [AlgorithmFacts(NAME, (), tuple(left))]
    work.exact = exact
    kept = {layer.node.name for layer, _ in layers}
    work.kept = {entry.request.consumer: entry for entry in work.decisions.chosen if _is_weight_of(entry, kept)}
    if not _errors(work, judged, expected).is_no_worse_than(before):
        work.network.load_state_dict(standing)
        work.exact, work.kept = None, {}
        reason = "the outputs on held-out samples got worse with it"
        left += [SkippedNode(change.partition(": ")[0], "", reason) for change in changed]
        changed.clear()
    work.choose()
    return [AlgorithmFacts(NAME, tuple(changed), tuple(left))]


def _is_weight_of(chosen: Chosen, names: set[str]) -> bool:
    return chosen.request.role is Role.WEIGHT and chosen.request.consumer.node in names


def _split(batches: Iterable[Batch], limit: int) -> tuple[list[Batch], list[Batch]]:
    """The first samples, at most `limit`, and those behind them to judge by: JUDGED at most, or a quarter of few. A
    batch that cannot be cut into samples stays whole."""
    taken: list[Batch] = []
    total = 0
    for batch in batches:
        taken.append(_cut(batch, 0, limit + JUDGED - total))
        total += _samples(taken[-1])
        if total >= limit + JUDGED:
            break
    left = min(limit, total - total // 4)
    seen: list[Batch] = []
    judged: list[Batch] = []
    for batch in taken:
        if left > 0:
            seen.append(_cut(batch, 0, left))
        if _samples(batch) > left and (left <= 0 or _counts_samples(batch)):
            judged.append(_cut(batch, max(left, 0), _samples(batch)))
        left -= _samples(batch)
    return seen, judged


def _samples(batch: Batch) -> int:
    return int(batch[0].shape[0]) if batch[0].dim() else 1


def _counts_samples(batch: Batch) -> bool:
    """True if the first axis of all tensors counts samples."""
    return len({int(tensor.shape[0]) if tensor.dim() else 0 for tensor in batch}) == 1 and batch[0].dim() > 1


def _cut(batch: Batch, first: int, last: int) -> Batch:
    return tuple(tensor[first:last] for tensor in batch) if _counts_samples(batch) else batch


def _layers(work: Decision) -> tuple[list[tuple[TorchLayer, TrainedLayer]], list[SkippedNode]]:
    """The layers that can be compensated; the others with the reason."""
    chosen = work.decisions.chosen
    weighted = {entry.request.consumer.node: entry for entry in chosen if entry.request.role is Role.WEIGHT}
    choices = {entry.request.consumer: entry.choice for entry in chosen if entry.request.consumer.node in weighted}
    layers, left = torch_layers(work.network, choices)
    readers = readers_of_parameters(work.network)
    usable = []
    for layer in layers:
        chosen_weight = weighted.get(layer.node.name)
        if chosen_weight is None:
            continue
        is_shared = len(readers.get(id(layer.weight_parameter), ())) > 1
        reason = "shares its weight with another layer" if is_shared else _reason_against(layer, chosen_weight)
        if reason is not None:
            left.append(layer.skipped(reason))
            continue
        source, layout = _rows(layer)
        assert layer.weight is not None
        op_type = layer.node.op_type
        trained = TrainedLayer(layer.node.name, op_type, layer.weight, None, None, True, source, layout, None)
        usable.append((layer, trained))
    return usable, left


def _reason_against(layer: TorchLayer, chosen: Chosen) -> str | None:
    spec = chosen.request.spec
    if isinstance(spec, AffineSpec) and spec.learning is not None:
        return "the scale of its weight is learned"
    if isinstance(spec, AffineSpec) and (spec.method in (MinMax(), NonOverflow()) or spec.group_size is not None):
        return "the scale of its weight follows the weight"
    if isinstance(chosen.choice, DynamicChoice) or isinstance(layer.data, DynamicChoice):
        return "its scales are not known before run time"
    value = layer.node.inputs[0]
    if value is None or value.constant is not None:
        return "its input is a constant"
    target = layer.operation.target
    if target in (*CONVOLUTIONS, *TRANSPOSED) and any(
        isinstance(argument, str) for argument in layer.operation.arguments
    ):
        return "its padding is given by name"
    return None


def _rows(layer: TorchLayer) -> tuple[RowSource, WeightLayout]:
    """The source of rows of inputs, and the layout of the weight for them."""
    target, arguments, shape = layer.operation.target, layer.operation.arguments, tuple(layer.weight_now().shape)
    rank = len(shape) - 2
    if target not in (*CONVOLUTIONS, *TRANSPOSED):
        is_output_first = bool(layer.node.setting("transB", 0))
        return MatrixRows(), WeightLayout(shape, (1, *shape), (0, 1, 2) if is_output_first else (0, 2, 1))

    def numbers(index: int, usual: int) -> list[int]:
        given: Any = arguments[index] if len(arguments) > index else usual
        values = [given] if isinstance(given, int) else list(given)
        return values * rank if len(values) == 1 else values

    is_transposed = target in TRANSPOSED
    strides, pads = numbers(0, 1), numbers(1, 0)
    extra = numbers(2, 0) if is_transposed else [0] * rank
    dilations = numbers(4 if is_transposed else 2, 1)
    groups = int(layer.node.setting("group", 1))
    windows = tuple(
        Window(shape[2 + i], strides[i], dilations[i], pads[i], pads[i], "", is_transposed, extra[i])
        for i in range(rank)
    )
    split = (groups, shape[0] // groups, *shape[1:])
    order = (0, 2, 1, *range(3, len(split))) if is_transposed else tuple(range(len(split)))
    return ConvolutionRows(windows, groups), WeightLayout(shape, split, order)


def _write(layer: TorchLayer, weight: torch.Tensor) -> None:
    """Make inference multiply by these weights. If folding multiplies a channel by 0, its weights are
    0 in any case."""
    parameters = layer.parameters
    parameter = layer.weight_parameter
    with torch.no_grad():
        wanted = weight.to(parameter)
        if isinstance(parameters, ConvBatchNorm):
            factor = parameters.channel_scale()
            shape = [1] * parameter.dim()
            shape[parameters.operation.channel_axis] = -1
            factor = factor.reshape(shape).to(parameter)
            wanted = torch.where(factor == 0, parameter, wanted / torch.where(factor == 0, 1.0, factor))
        parameter.copy_(wanted)


def _errors(work: Decision, judged: Sequence[Batch], expected: Sequence[Outputs]) -> OutputErrors:
    """Compare the outputs of the network, as quantized so far, with those expected; empty without samples."""
    if not all(gathered(bool(judged))):
        return OutputErrors()
    trial = copy.copy(work)
    trial.network = copy.deepcopy(work.network)
    options = work.settings.options_of("bias_correction")
    trial.choose()
    if options is not None:
        bias_correction.after_choosing(trial, replace(options, samples=min(options.samples, CORRECTION_SAMPLES)))
    insert(trial.network, trial.decisions, None, work.ranges)
    outputs = _outputs(trial.network, judged)
    errors = OutputErrors()
    parts = find_parts(expected, expected) if expected[0] else []
    classes = frozenset(part.place.output for part in parts if isinstance(part, ClassesMeter))
    for wanted, own in zip(expected, outputs, strict=True):
        errors.add(wanted, own, classes)
    ranks = gathered(errors)
    return OutputErrors([x for rank in ranks for x in rank.relative], [x for rank in ranks for x in rank.divergence])


def _outputs(network: fx.GraphModule, batches: Sequence[Batch]) -> list[Outputs]:
    """The floating-point outputs for each sample, by their number; for a batch, if their first axes do not count its
    samples."""
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    was_training = network.training
    network.eval()
    rows: list[Outputs] = []
    for batch in batches:
        runner = fx.Interpreter(network)
        runner.extra_traceback = False
        with torch.no_grad():
            result: Any = runner.run(*(tensor.to(device) for tensor in batch), enable_io_processing=False)
        values = {
            str(number): np.atleast_1d(value.float().cpu().numpy())
            for number, value in enumerate([result] if isinstance(result, torch.Tensor) else result)
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel()
        }
        count = _samples(batch)
        is_by_sample = all(len(value) == count for value in values.values())
        rows += (
            [{name: value[i : i + 1] for name, value in values.items()} for i in range(count)]
            if is_by_sample
            else [values]
        )
    network.train(was_training)
    return rows
