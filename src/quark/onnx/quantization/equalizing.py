"""The step `equalize`, with the look at activations that its algorithms need beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import onnx_ir as ir
from numpy.typing import NDArray

from quark.account import AlgorithmFacts
from quark.onnx.calibrate import ChannelExtremes, ChannelMoments, FloatRunner, Statistic, survey
from quark.onnx.choose import AffineSpec
from quark.onnx.data import Samples
from quark.onnx.equalize import (
    CLIP_SAMPLES,
    ClipTreatment,
    CrossLayerOptions,
    clip_tensors,
    equalize_cross_layer,
    smooth,
    smooth_tensors,
)
from quark.onnx.quantization.settings import Settings

SMOOTH_SAMPLES = 128  # of those that there are, evenly spaced

Found = TypeVar("Found", bound=Statistic)
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
        statistics = _surveyed(
            model, {name: ChannelMoments(axis) for name, axis in wanted.items()}, samples, settings, SMOOTH_SAMPLES
        )
        found = {name: each.statistics for name, each in statistics.items()}
        facts.append(smooth(model, settings.equalize.smooth, found, **_integers(settings)))
    return tuple(facts)


def _with_data(options: CrossLayerOptions, samples: Samples) -> CrossLayerOptions:
    """Random numbers say nothing of where activations end."""
    if options.clip is not ClipTreatment.CALIBRATED or not samples.is_random:
        return options
    return replace(options, clip=ClipTreatment.SKIP)


def _extremes(model: ir.Model, wanted: Mapping[str, int], samples: Samples, settings: Settings) -> Extremes:
    statistics = {name: ChannelExtremes(axis) for name, axis in wanted.items()}
    found = _surveyed(model, statistics, samples, settings, CLIP_SAMPLES)
    return {name: (each.lowest, each.highest) for name, each in found.items()}


def _surveyed(
    model: ir.Model, statistics: Mapping[str, Found], samples: Samples, settings: Settings, limit: int
) -> dict[str, Found]:
    if not statistics:
        return {}
    with FloatRunner(model, statistics, providers=settings.calibrate.providers) as runner:
        return survey(runner, statistics, samples, settings.calibrate, sample_limit=limit)


def _integers(settings: Settings) -> dict[str, bool]:
    """What the integers will be like that SmoothQuant estimates the error of."""
    activation, weight = settings.choose.default.activation, settings.choose.default.weight
    return {
        "is_per_channel": not isinstance(weight, AffineSpec) or weight.is_per_channel,
        "is_symmetric": isinstance(activation, AffineSpec) and activation.is_symmetric,
    }
