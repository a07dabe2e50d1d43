"""The first layer where two networks part.

That is the first, in the order of the graph, whose accumulated SQNR is below a limit. Where none is, it is the one
behind which most was lost: whose error, relative to what came in, grew most. Whether it is its own doing is told by its
local error: beyond half of the whole error it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quark.diagnosis import Diagnosis, LayerDiagnosis

BELOW_DB = 10.0
OWN_SHARE = 0.5


@dataclass(frozen=True)
class Divergence:
    """`layer` is where they part, number `index` of the diagnosis' layers. `is_below` is whether it is below the limit;
    else it has the greatest loss, `loss_db` from what came in. `is_own` is whether it is its own doing; `share` is the
    part of its error that its own rounding makes. `worst` has the greatest local error of it and those before it."""

    layer: LayerDiagnosis
    index: int
    is_below: bool
    loss_db: float
    is_own: bool
    share: float
    worst: LayerDiagnosis


def first_divergence(diagnosis: Diagnosis, below_db: float = BELOW_DB) -> Divergence | None:
    """None where every layer is exact."""
    layers = diagnosis.layers
    inexact = [index for index, each in enumerate(layers) if _db(each) < math.inf]
    if not inexact:
        return None
    below = next((index for index in inexact if _db(layers[index]) < below_db), None)
    losses = _losses(layers)
    index = below if below is not None else max(inexact, key=lambda each: (losses[each], -each))
    share = _own_share(layers[index])
    worst = min(layers[: index + 1], key=lambda each: math.inf if each.local is None else each.local.sqnr_db)
    return Divergence(layers[index], index, below is not None, losses[index], share >= OWN_SHARE, share, worst)


def _db(layer: LayerDiagnosis) -> float:
    return math.inf if layer.accumulated is None else layer.accumulated.sqnr_db


def _losses(layers: tuple[LayerDiagnosis, ...]) -> list[float]:
    """How many dB less than the worst layer before it each has; the first compares with what it could be at best."""
    losses, before = [], 60.0
    for each in layers:
        db = min(_db(each), before if before > 60.0 else 60.0)
        losses.append(before - db)
        before = min(before, db)
    return losses


def _own_share(layer: LayerDiagnosis) -> float:
    """The power of its own error in that of the accumulated one."""
    if layer.local is None or layer.local.sqnr_db == math.inf:
        return 0.0
    if layer.local.sqnr_db == -math.inf or _db(layer) == -math.inf:
        return 1.0 if layer.local.sqnr_db == -math.inf else 0.0
    return min(1.0, float(10 ** ((_db(layer) - layer.local.sqnr_db) / 10)))
