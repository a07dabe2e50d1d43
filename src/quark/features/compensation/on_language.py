"""Compensation of the linear layers of a language model, one group of layers that share an input after the other."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from quark.account import AlgorithmFacts
from quark.features.compensation.matrices import effective_damping, round_matrices
from quark.features.compensation.options import CompensationOptions, LanguageCompensationOptions
from quark.features.compensation.rounding import Root
from quark.plan import SkippedNode
from quark.torch.language.architecture import check_inside, is_inside
from quark.torch.language.input_sums import Array, InputSums, alike, input_sums, matrix
from quark.torch.language.pipeline import LayerWork, ModelWork

NAME = "compensation"
DAMPING_FACTORS = (1.0, 8.0, 64.0)  # tried in this order on held rows, until one does worse


def before_layers(work: ModelWork, options: CompensationOptions) -> list[AlgorithmFacts]:
    """Check the names of modules."""
    check_inside(work.model, work.architecture, getattr(options, "modules", ()))
    return []


def round_weights(work: LayerWork, options: CompensationOptions) -> list[AlgorithmFacts]:
    """Round the weights of a layer; each group sees what the rounding of those before it has changed."""
    if not isinstance(options, LanguageCompensationOptions):
        options = LanguageCompensationOptions(**asdict(options))
    changed: list[str] = []
    if work.streams is None:
        reason = "there is no calibration data"
        return [AlgorithmFacts(NAME, (), tuple(SkippedNode(work.full_name(p), "Linear", reason) for p in work.targets))]
    for group in work.groups:
        for paths in alike(work, group):
            inside = [path for path in paths if is_inside(path, options.modules)]
            wanted = [path for path in inside if path not in work.is_rounded and work.targets[path].weight is not None]
            if not wanted:
                continue
            sums = input_sums(work, wanted[:1], options.sample_limit)[wanted[0]]
            for spec in dict.fromkeys(work.targets[path].weight for path in wanted):
                changed += _round(work, [path for path in wanted if work.targets[path].weight == spec], sums, options)
    return [AlgorithmFacts(NAME, tuple(changed))]


def _round(work: LayerWork, paths: list[str], sums: InputSums, options: LanguageCompensationOptions) -> list[str]:
    """Round linear layers with the same spec, and say what was gained."""
    weights = [matrix(work, path) for path in paths]
    spec = work.targets[paths[0]].weight
    assert spec is not None
    whole, starts = np.concatenate(weights), np.cumsum([len(weight) for weight in weights])[:-1]
    damping = chosen_damping(whole, sums, options)
    best = np.split(wanted_weights(whole, sums, damping, options), starts)
    roundings = round_matrices(weights, best, sums.inner, spec, damping, options)
    for path, rounding in zip(paths, roundings, strict=True):
        work.set_rounded(path, rounding.weight)
    names = ", ".join(work.full_name(path) for path in paths)
    return [f"{names}: squared error {roundings[0].ratio:.3g} of what it was"]


def wanted_weights(weight: Array, sums: InputSums, damping: float, options: LanguageCompensationOptions) -> Array:
    """The float weights that give for the inputs of the quantized network what the layer gives in the float one."""
    if sums.cross is sums.inner or (sums.cross == sums.inner).all():
        return weight
    share = options.float_share if options.needs_exact_inputs else 1.0
    cross = sums.inner + share * (sums.cross - sums.inner)
    root = Root.of(sums.inner[None], np.arange(len(sums.inner)), damping)
    return np.asarray(root.best_weights(weight[None], cross[None])[0])


def chosen_damping(weight: Array, sums: InputSums, options: LanguageCompensationOptions) -> float:
    """Return the damping of the options, or the multiple of it that does best on held rows.

    With few rows and little damping, weights fit these rows and little else.
    """
    damping = effective_damping(sums.inner, options)
    if sums.held is None:
        return damping
    rest, (exact, seen) = sums.without_held(), sums.held
    expected = exact @ weight.T.astype(np.float32)
    chosen, least = damping, np.inf
    for factor in DAMPING_FACTORS:
        tried = wanted_weights(weight, rest, factor * damping, options)
        error = float(np.square(seen @ tried.T.astype(np.float32) - expected).sum())
        if error >= least:
            break
        chosen, least = factor * damping, error
    return chosen
