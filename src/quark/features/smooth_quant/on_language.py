"""SmoothQuant of a language model: scales folded into normalizations and projections.

With a given alpha the scales follow from the formula, and a group stays as it is if the estimated error would rise. The
search for an alpha compares outputs that are computed with rounded inputs and weights, since the type of both is known.
"""

from __future__ import annotations

import numpy as np
import torch

from quark.account import AlgorithmFacts
from quark.decide.specs import is_measured
from quark.features.smooth_quant.groups import steps_of
from quark.features.smooth_quant.options import SmoothOptions
from quark.features.smooth_quant.smoothing import (
    Array,
    ChannelMoments,
    ChannelStatistics,
    LayerWeight,
    find_smoothing,
    smoothing_scales,
)
from quark.plan import SkippedNode
from quark.ranges import TensorRange
from quark.torch.language.activations import quantizer_of
from quark.torch.language.folding import ScaledGroup, divide, outputs_of, scaled_groups, tried
from quark.torch.language.input_sums import matrix
from quark.torch.language.linear import round_to_nearest
from quark.torch.language.pipeline import LayerWork

NAME = "SmoothQuant"
SEARCHED_ALPHAS = tuple(step / 10 for step in range(11))
SEARCHED_BATCHES = 2


def before_rounding(work: LayerWork, options: SmoothOptions) -> list[AlgorithmFacts]:
    """Smooth the inputs of linear layers."""
    if work.streams is None:
        reason = "there is no calibration data"
        return [AlgorithmFacts(NAME, (), tuple(SkippedNode(work.full_name(p), "Linear", reason) for p in work.targets))]
    groups, left = scaled_groups(work, options.groups)
    changed: list[str] = []
    skipped = list(left)
    statistics = _statistics(work, [group.input for group in groups]) if groups else {}
    for group in groups:
        names = ", ".join(work.full_name(path) for path in group.linears)
        smoothing = _scales(work, group, options, statistics[group.input])
        if isinstance(smoothing, str):
            skipped.append(SkippedNode(names, "Linear", smoothing))
            continue
        scales, words = smoothing
        divide(work, group, scales)
        changed.append(f"{names}: {words}, folded into {group.source}")
    return [AlgorithmFacts(NAME, tuple(changed), tuple(skipped))]


def _statistics(work: LayerWork, paths: list[str]) -> dict[str, ChannelStatistics]:
    moments = {path: ChannelMoments(-1) for path in paths}
    for batch in work.inputs(paths):
        for path, (_, rows) in batch.items():
            moments[path].observe(rows.float().cpu().numpy())
            moments[path].end_of_sample()
    return {path: moment.statistics for path, moment in moments.items()}


def _quantized_linears(work: LayerWork, group: ScaledGroup) -> list[str]:
    specs = {path: work.targets.get(path) for path in group.linears}
    return [path for path, spec in specs.items() if spec is not None and spec.activation and spec.weight]


def _scales(
    work: LayerWork, group: ScaledGroup, options: SmoothOptions, statistics: ChannelStatistics
) -> tuple[Array, str] | str:
    """The scales with a note on them, or the reason why there are none."""
    paths = _quantized_linears(work, group)
    if not paths:
        return "its input is not quantized"
    if options.alpha is None:
        return _searched(work, group, options, statistics)
    layers = [LayerWeight.of(matrix(work, path).T[None, :, :, None]) for path in paths]
    smoothing = find_smoothing(layers, statistics, options.alpha, steps_of(work.targets[paths[0]]))
    if smoothing.gain_db <= 0:
        return f"alpha {options.alpha:g} would raise the estimated error by {-smoothing.gain_db:.1f} dB"
    scales = group.tied(np.maximum(smoothing.scales, options.least_scale))
    return scales, f"alpha {options.alpha:g}, estimated error {-smoothing.gain_db:+.1f} dB"


def _searched(
    work: LayerWork, group: ScaledGroup, options: SmoothOptions, statistics: ChannelStatistics
) -> tuple[Array, str] | str:
    """The alpha with the least error of the outputs."""
    expected = outputs_of(work, group, SEARCHED_BATCHES)
    reach = np.max([np.abs(matrix(work, path)).max(axis=0) for path in group.linears], axis=0)
    none = _error(work, group, np.ones(len(reach)), statistics, expected, options.error_power)
    best: tuple[float, float, Array | None] = (none, 0.0, None)
    for alpha in SEARCHED_ALPHAS:
        scales = group.tied(np.maximum(smoothing_scales(statistics.reach, reach, alpha), options.least_scale))
        current_error = _error(work, group, scales, statistics, expected, options.error_power)
        if current_error < best[0]:
            best = (current_error, alpha, scales)
    if best[2] is None:
        return "no alpha lowers the error of its outputs"
    return best[2], f"alpha {best[1]:g}, error of outputs {best[0] / none:.3g} of what it was"


def _error(
    work: LayerWork,
    group: ScaledGroup,
    scales: Array,
    statistics: ChannelStatistics,
    expected: list[torch.Tensor],
    power: float,
) -> float:
    """The mean difference of outputs, to that power, with the rounding that inputs and weights will have."""
    path = _quantized_linears(work, group)[0]
    spec = work.targets[path].activation
    assert spec is not None
    low, high = (statistics.lowest / scales).min(initial=0), (statistics.highest / scales).max(initial=0)
    range_ = TensorRange(float(low), float(high)) if is_measured(spec) else None
    quantizer = quantizer_of(spec, range_, path).to(work.linear(path).weight.device)
    weights = {}
    for linear in group.linears:
        weight, target = torch.from_numpy(matrix(work, linear) * scales), work.targets.get(linear)
        is_rounded = target is not None and target.weight is not None
        weights[linear] = round_to_nearest(weight, target.weight).values if is_rounded else weight  # type: ignore[arg-type,union-attr]
    with tried(work, group, scales, weights, quantizer):
        outputs = outputs_of(work, group, SEARCHED_BATCHES)
    return sum(float((a - b).abs().double().pow(power).mean()) for a, b in zip(outputs, expected, strict=True))
