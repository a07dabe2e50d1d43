"""What a GPU replays as a CUDA graph: the same steps as ordinary ones. Here they are not recorded, only separated into
what is set before a replay and what a graph would hold."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import pytest
from fitted_layers import affine, blocks, dense, layer, normal

import quark.features.finetuning.descent as descents
import quark.features.finetuning.replay as replays
import quark.features.finetuning.torch_fit as torch_fit
from quark.features.finetuning.options import Algorithm, FitOptions
from quark.features.finetuning.problem import Bounds
from quark.features.finetuning.torch_fit import fit_by_torch

WEIGHT = normal(1, 6, 24)
ADAROUND = FitOptions(Algorithm.ADAROUND, iterations=40, learning_rate=None)
ADAQUANT = FitOptions(Algorithm.ADAQUANT, iterations=40, learning_rate=None)


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[Hashable]:
    """The kinds of the steps that a GPU would have replayed."""
    seen: list[Hashable] = []

    def run(self: replays.Replay, kind: Hashable) -> None:
        seen.append(kind)
        self._step()

    monkeypatch.setattr(torch_fit, "REPLAYED_ON", ("cpu",))
    monkeypatch.setattr(replays.Replay, "run", run)
    return seen


@pytest.mark.parametrize("options", [ADAROUND, ADAQUANT], ids=["AdaRound", "AdaQuant"])
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("activation", [None, Bounds(0.0, np.inf)], ids=["linear", "Relu"])
@pytest.mark.parametrize("choice", [affine(WEIGHT, "int4"), blocks("mxfp4_e2m1", 1)], ids=["int4", "MXFP4"])
def test_replayed_iterations_are_the_ordinary_ones(
    monkeypatch: pytest.MonkeyPatch,
    kinds: list[Hashable],
    options: FitOptions,
    batches: int,
    activation: Bounds | None,
    choice: object,
) -> None:
    monkeypatch.setattr(descents, "native_finetuning", lambda: None)
    problem = replace(layer(WEIGHT, dense(6, 24), choice), activation=activation)
    options = replace(options, batches=batches, batch_rows=16)
    fitted = fit_by_torch(problem, options)
    assert len(kinds) == options.iterations
    assert set(kinds) == ({False, True} if options.algorithm is Algorithm.ADAROUND else {False})
    monkeypatch.setattr(torch_fit, "REPLAYED_ON", ())
    wanted = fit_by_torch(problem, options)
    assert wanted.weight is not None
    assert fitted.weight is not None
    assert np.array_equal(fitted.weight, wanted.weight)
    assert fitted.error_after == wanted.error_after


@pytest.mark.parametrize("options", [replace(ADAQUANT, batches=-1), replace(ADAQUANT, drop_ratio=0.5)])
def test_steps_that_no_graph_can_hold_are_ordinary(kinds: list[Hashable], options: FitOptions) -> None:
    problem = layer(WEIGHT, dense(6, 24), affine(WEIGHT, "int4"))
    rows = replace(problem.training, float=problem.training.quantized)
    problem = replace(problem, activation=Bounds(0.0, np.inf), training=rows)
    fit_by_torch(problem, replace(options, batch_rows=16))
    assert not kinds
