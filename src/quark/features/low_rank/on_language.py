"""Low-rank branches of the linear layers of a language model."""

from __future__ import annotations

from fnmatch import fnmatch

import numpy as np
import torch

from quark.account import AlgorithmFacts
from quark.decide.specs import TensorSpec
from quark.features.compensation.matrices import round_matrix
from quark.features.compensation.options import LanguageCompensationOptions
from quark.features.compensation.rounding import squared_error
from quark.features.low_rank.branches import branch, branch_scales
from quark.features.low_rank.options import LowRankOptions
from quark.plan import SkippedNode
from quark.torch.language.input_sums import Array, InputSums, alike, input_sums, matrix
from quark.torch.language.linear import RoundedWeight, round_to_nearest
from quark.torch.language.pipeline import LayerWork

NAME = "low-rank branch"


def round_weights(work: LayerWork, options: LowRankOptions) -> list[AlgorithmFacts]:
    """Give linear layers a branch, and round what it leaves. Without data the branch is that of the weight alone."""
    changed: list[str] = []
    left: list[SkippedNode] = []
    parts = [part for group in work.groups for part in alike(work, group)] or [[path] for path in work.targets]
    for paths in parts:
        wanted = []
        for path in paths:
            reason = _obstacle(work, path, options)
            if reason:
                left.append(SkippedNode(work.full_name(path), "Linear", reason))
            else:
                wanted.append(path)
        if wanted:
            sums = None if work.streams is None else input_sums(work, wanted[:1], is_exact=False)[wanted[0]]
            search_sums = _of_search(work, wanted[0], options, sums)
            changed += [f"{work.full_name(path)}: {_round(work, path, sums, search_sums, options)}" for path in wanted]
    return [AlgorithmFacts(NAME, tuple(changed), tuple(left))]


def _obstacle(work: LayerWork, path: str, options: LowRankOptions) -> str:
    """The reason why a linear layer gets no branch; empty if it gets one."""
    name, shape = work.full_name(path), work.linear(path).weight.shape
    if path in work.is_rounded or work.targets[path].weight is None:
        return "its weight is not rounded here"
    if any(fnmatch(name, pattern) for pattern in options.exclude):
        return "its name is excluded"
    return f"it has fewer than {options.least_size} inputs or outputs" if min(shape) < options.least_size else ""


def _of_search(work: LayerWork, path: str, options: LowRankOptions, sums: InputSums | None) -> InputSums | None:
    """The sums that alpha is searched with, of the first batches."""
    if sums is None or not options.alphas:
        return None
    assert work.streams is not None
    if options.searched_batches >= len(work.streams):
        return sums
    sequences = sum(hidden.shape[0] for hidden in work.streams.seen[: options.searched_batches])
    return input_sums(work, [path], sequences, is_exact=False)[path]


def _round(
    work: LayerWork, path: str, sums: InputSums | None, search_sums: InputSums | None, options: LowRankOptions
) -> str:
    weight, spec = matrix(work, path), work.targets[path].weight
    assert spec is not None
    alpha = options.alpha
    if search_sums is not None:
        errors = {candidate: _error(weight, search_sums, spec, candidate, options.rank) for candidate in options.alphas}
        alpha = min(errors, key=lambda candidate: errors[candidate])
    scales = np.ones(weight.shape[1]) if sums is None else branch_scales(sums.largest, weight, alpha)
    down, up = branch(weight, scales, options.rank)
    residual = weight - up @ down
    rounded = _rounded(residual, spec)
    if options.is_compensated and sums is not None:
        own = LanguageCompensationOptions(
            damping=options.damping,
            has_activation_order=options.has_activation_order,
            block_size=options.block_size,
        )
        rounded = round_matrix(residual, residual, sums.inner, spec, own.damping, own).weight
    work.set_rounded(path, rounded, tuple(torch.from_numpy(np.ascontiguousarray(factor)) for factor in (down, up)))
    return f"rank {len(down)}" if sums is None else f"rank {len(down)}, alpha {alpha:g}"


def _error(weight: Array, sums: InputSums, spec: TensorSpec, alpha: float, rank: int) -> float:
    """The squared error of the outputs with that alpha, if what the branch leaves is rounded to nearest."""
    down, up = branch(weight, branch_scales(sums.largest, weight, alpha), rank)
    residual = weight - up @ down
    difference = residual - _rounded(residual, spec).values.double().numpy()
    return float(squared_error(difference[None], sums.inner[None]).sum())


def _rounded(values: Array, spec: TensorSpec) -> RoundedWeight:
    return round_to_nearest(torch.from_numpy(values), spec)
