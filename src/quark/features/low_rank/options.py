"""The options of low-rank branches."""

from __future__ import annotations

from dataclasses import dataclass

from quark.features.feature import Feature


@dataclass(frozen=True)
class LowRankOptions:
    """`rank` of the branch. `alpha` is the share of the difficulty that smoothing moves from activations to weights
    before the branch is found; `alphas` are tried instead if there are any, on the first `searched_batches` batches.
    Layers whose name matches a pattern of `exclude`, or with fewer than `least_size` inputs or outputs, have no branch.
    With `is_compensated`, what the branch leaves is rounded by compensation with the other options.
    """

    rank: int = 32
    alpha: float = 0.5
    alphas: tuple[float, ...] = tuple(step / 20 for step in range(1, 20))
    searched_batches: int = 8
    exclude: tuple[str, ...] = ()
    least_size: int = 256
    is_compensated: bool = False
    block_size: int = 128
    damping: float = 0.01
    has_activation_order: bool = False


FEATURE = Feature("low_rank", nouns={"low-rank branch": "layer"})
