"""The step `equalize`, with the look at activations that its algorithms need beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from quark.account import AlgorithmFacts
from quark.onnx.calibrate import ChannelExtremes, FloatRunner, survey
from quark.onnx.data import Samples
from quark.onnx.equalize import (
    ClipTreatment,
    CrossLayerOptions,
    clip_tensors,
    equalize_cross_layer,
    smooth,
    smooth_tensors,
)
from quark.onnx.quantization.settings import Settings

Extremes = dict[str, tuple[NDArray[Any], NDArray[Any]]]


def equalize(model: ir.Model, samples: Samples, settings: Settings) -> tuple[AlgorithmFacts, ...]:
    """Rescale between layers as the settings say, in place; what each algorithm did."""
    facts = []
    if settings.equalize.cross_layer is not None:
        options = _with_data(settings.equalize.cross_layer, samples)
        facts.append(
            equalize_cross_layer(model, options, _extremes(model, clip_tensors(model, options), samples, settings))
        )
    if settings.equalize.smooth is not None:
        wanted = smooth_tensors(model, settings.equalize.smooth)
        facts.append(smooth(model, settings.equalize.smooth, _extremes(model, wanted, samples, settings)))
    return tuple(facts)


def _with_data(options: CrossLayerOptions, samples: Samples) -> CrossLayerOptions:
    """Random numbers say nothing of where activations end."""
    if options.clip is not ClipTreatment.CALIBRATED or not samples.is_random:
        return options
    return replace(options, clip=ClipTreatment.SKIP)


def _extremes(model: ir.Model, wanted: Mapping[str, int], samples: Samples, settings: Settings) -> Extremes:
    if not wanted:
        return {}
    with FloatRunner(model, wanted, providers=settings.calibrate.providers) as runner:
        statistics = {name: ChannelExtremes(axis) for name, axis in wanted.items()}
        found = survey(runner, statistics, samples, settings.calibrate, sample_limit=EXTREMES_SAMPLES)
    return {name: (each.lowest, each.highest) for name, each in found.items()}


EXTREMES_SAMPLES = 128  # of those that there are, evenly spaced
