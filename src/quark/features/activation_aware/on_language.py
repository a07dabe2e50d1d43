"""AWQ of a language model: scales of channels, folded into norms and projections, and searched scales of weights."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import torch

from quark.account import AlgorithmFacts
from quark.decide.specs import TensorSpec
from quark.features.activation_aware.options import ActivationAwareOptions, LanguageScalingOptions
from quark.features.activation_aware.scaling import (
    EXPONENTS,
    Array,
    Quantize,
    Scaling,
    find_scaling,
    scaling_candidates,
)
from quark.features.compensation.matrices import round_matrix
from quark.features.compensation.options import LanguageCompensationOptions
from quark.plan import SkippedNode
from quark.torch.language.folding import ScaledGroup, divide, outputs_of, scaled_groups, tried
from quark.torch.language.input_sums import InputSums, alike, input_sums, matrix
from quark.torch.language.linear import round_to_nearest
from quark.torch.language.pipeline import LayerWork

NAME = "AWQ"
RANGES = "AWQ ranges"
INSPECTED_BATCHES = 2  # batches on which the output of a named module is compared
FEW_EXPONENTS = EXPONENTS[1::2]


def before_rounding(work: LayerWork, options: ActivationAwareOptions) -> list[AlgorithmFacts]:
    """Rescale the inputs of linear layers where that makes rounding better."""
    own = _own(options)
    if work.streams is None:
        reason = "there is no calibration data"
        return [AlgorithmFacts(NAME, (), tuple(SkippedNode(work.full_name(p), "Linear", reason) for p in work.targets))]
    if not own.has_scales:
        return []
    groups, left = scaled_groups(work, own.groups)
    groups = tuple(group for group in groups if _rounded_linears(work, group))
    if not groups:
        return [AlgorithmFacts(NAME, (), left)] if left else []
    sums = input_sums(work, [group.input for group in groups], own.sample_limit, is_quantized=False, is_exact=False)
    changed: list[str] = []
    skipped = list(left)
    for group in groups:
        names = ", ".join(work.full_name(path) for path in group.linears)
        scaling = _find(work, group, sums[group.input])
        if scaling.error < scaling.error_before:
            divide(work, group, scaling.scales)
            gain = scaling.error / scaling.error_before
            changed.append(f"{names}: folded into {group.source}, squared error {gain:.3g} of what it was")
        else:
            skipped.append(SkippedNode(names, "Linear", "no scales are better than none"))
    return [AlgorithmFacts(NAME, tuple(changed), tuple(skipped))]


def round_weights(work: LayerWork, options: ActivationAwareOptions) -> list[AlgorithmFacts]:
    """Round with searched scales, which clip where that is better; compensation does the same if it is on."""
    own = _own(options)
    if not own.has_clipping or work.streams is None or work.settings.options_of("compensation") is not None:
        return []
    plain = LanguageCompensationOptions(has_compensation=False)
    named = {path for group in own.groups for path in group.linears}
    changed = []
    for group in work.groups:
        for paths in alike(work, group):
            wanted = [path for path in paths if path not in work.is_rounded and (not named or path in named)]
            wanted = [path for path in wanted if work.targets[path].weight is not None]
            if not wanted:
                continue
            gram = input_sums(work, wanted[:1], own.sample_limit, is_exact=False)[wanted[0]].inner
            for path in wanted:
                spec, weight = work.targets[path].weight, matrix(work, path)
                assert spec is not None
                rounding = round_matrix(weight, weight, gram, spec, plain.damping, plain)
                work.set_rounded(path, rounding.weight)
                changed.append(f"{work.full_name(path)}: squared error {rounding.ratio:.3g} of what it was")
    return [AlgorithmFacts(RANGES, tuple(changed))] if changed else []


def _own(options: ActivationAwareOptions) -> LanguageScalingOptions:
    return options if isinstance(options, LanguageScalingOptions) else LanguageScalingOptions(**asdict(options))


def _rounded_linears(work: LayerWork, group: ScaledGroup) -> list[str]:
    return [path for path in group.linears if path in work.targets and work.targets[path].weight is not None]


def _find(work: LayerWork, group: ScaledGroup, sums: InputSums) -> Scaling:
    paths = _rounded_linears(work, group)
    weights = [matrix(work, path) for path in paths]
    rounds = [_rounding(work.targets[path].weight) for path in paths]
    if group.inspected:
        return _inspected(work, group, paths, sums.magnitudes)
    return find_scaling(weights, sums.magnitudes, sums.inner, rounds, FEW_EXPONENTS, group.tied)


def _rounding(spec: TensorSpec | None) -> Quantize:
    assert spec is not None
    return lambda values: round_to_nearest(torch.from_numpy(np.asarray(values, np.float32)), spec).values.numpy()


def _inspected(work: LayerWork, group: ScaledGroup, paths: list[str], magnitudes: Array) -> Scaling:
    """The scales with the least squared error of what the inspected module returns."""
    expected = outputs_of(work, group, INSPECTED_BATCHES)
    weights = {path: matrix(work, path) for path in paths}
    power = sum(float(output.double().square().sum()) for output in expected) or 1.0

    def error(scales: Array) -> float:
        rounded = {}
        for path, weight in weights.items():
            spec = work.targets[path].weight
            assert spec is not None
            rounded[path] = round_to_nearest(torch.from_numpy(weight * scales), spec).values
        for path in set(group.linears) - set(paths):
            rounded[path] = torch.from_numpy(matrix(work, path) * scales)
        with tried(work, group, scales, rounded):
            outputs = outputs_of(work, group, INSPECTED_BATCHES)
        return sum(float((a - b).double().square().sum()) for a, b in zip(outputs, expected, strict=True)) / power

    best = before = Scaling(np.ones(len(magnitudes)), 0.0, (start := error(np.ones(len(magnitudes)))), start)
    for exponent in FEW_EXPONENTS:
        for scales in scaling_candidates(list(weights.values()), magnitudes, exponent):
            own = group.tied(scales)
            current_error = error(own)
            if current_error < best.error:
                best = Scaling(own, exponent, current_error, before.error)
    return best
