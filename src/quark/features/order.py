"""The features that both pipelines run, in their order.

A feature is a folder beside this file and a line in ORDER. Its `options.py` has a `Feature` named FEATURE. Its modules
`on_onnx.py` and `on_torch.py`, of which a feature for one road only has one, define some of these functions:

    before_calibration(work, options)   change the float network, but not what it computes; returns AlgorithmFacts
    watched(work, options)              names of tensors that `after_choosing` reads while the float network runs
    after_choosing(work, options)       change weights and biases, knowing formats and scales; returns AlgorithmFacts

Each gets the state of the run and the feature's options, and returns a sequence. The state is `Work`, after choosing
`Decision`, of `quark.onnx.deciding` or `quark.torch.deciding`. The modules are only imported in a run that uses the
feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from quark.features.feature import Feature

ORDER = (
    "rotation",
    "equalization",
    "smooth_quant",
    "activation_aware",
    "low_rank",
    "centering",
    "compensation",
    "sign_rounding",
    "bias_correction",
    "finetuning",  # with the biases and scales that layers end up with
    "distillation",  # last: starts from the result of all others
)
FEATURES: tuple[Feature, ...] = tuple(import_module(f"quark.features.{folder}.options").FEATURE for folder in ORDER)
TRAINING = tuple(feature for feature in FEATURES if feature.trains)


class Settings(Protocol):
    """The settings of a run, on either road."""

    def options_of(self, feature: str) -> Any:
        """The options of a feature; None if it is off."""


class Work(Protocol):
    """The state of a run, on either road."""

    @property
    def settings(self) -> Settings: ...


def call(road: str, function: str, work: Work, features: Sequence[Feature] = FEATURES) -> tuple[Any, ...]:
    """Call a hook of every active feature that has it, in order, and join the results. `road` is onnx, torch, or
    language (quark.torch.language lists the hooks it calls)."""
    results: list[Any] = []
    for feature in features:
        options = work.settings.options_of(feature.folder)
        if options is None:
            continue
        module = f"quark.features.{feature.folder}.on_{road}"
        apply = getattr(import_module(module), function, None) if find_spec(module) is not None else None
        results += [] if apply is None else apply(work, options)
    return tuple(results)


def options_in_use(settings: Settings) -> tuple[Any, ...]:
    """The options of all features that are on."""
    options = (settings.options_of(feature.folder) for feature in FEATURES)
    return tuple(chosen for chosen in options if chosen is not None)


def data_uses(settings: Settings) -> tuple[str, ...]:
    """The reasons why active features need real calibration data rather than random numbers."""
    on = (feature for feature in FEATURES if settings.options_of(feature.folder) is not None)
    return tuple(feature.data_use for feature in on if feature.data_use)


def features_missing(road: str, settings: Settings) -> tuple[str, ...]:
    """The folders of active features that do nothing on that road."""
    on = (feature.folder for feature in FEATURES if settings.options_of(feature.folder) is not None)
    return tuple(folder for folder in on if find_spec(f"quark.features.{folder}.on_{road}") is None)
