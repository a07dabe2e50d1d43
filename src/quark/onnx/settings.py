"""Everything a run needs to know, typed and frozen: one value with the options of every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quark.decide.options import ChoiceOptions
from quark.decide.specs import is_measured
from quark.features.bias_correction.options import BiasCorrectionOptions, CorrectionInputs
from quark.features.equalization.options import CrossLayerOptions
from quark.features.finetuning.options import FinetuneOptions
from quark.features.mixed_precision.options import MixOptions
from quark.features.order import TRAINING, data_uses
from quark.features.protection.options import ProtectOptions
from quark.features.rotation.options import RotationOptions
from quark.features.smooth_quant.options import SmoothOptions
from quark.onnx.calibrate.passes import CalibrationOptions
from quark.onnx.insert.pairs import InsertOptions
from quark.onnx.load import LoadOptions
from quark.onnx.optimize import OptimizeOptions
from quark.onnx.save import SaveOptions
from quark.onnx.simulate import SimulateOptions


@dataclass(frozen=True)
class EqualizeOptions:
    """Options of features that rescale between layers; None: off."""

    cross_layer: CrossLayerOptions | None = None
    smooth: SmoothOptions | None = None
    rotation: RotationOptions | None = None


@dataclass(frozen=True)
class RefineOptions:
    """Options of features that correct constants once every scale is known; None: off."""

    bias_correction: BiasCorrectionOptions | None = None
    finetune: FinetuneOptions | None = None


@dataclass(frozen=True)
class Settings:
    """`config` is the user's own, as JSON can hold it, for the report. `remarks` list the options that were given and
    cannot matter here, each with the reason. `features` has the options of the features that a switch of
    features/order.py turns on, by folder."""

    choose: ChoiceOptions
    name: str = "custom"
    load: LoadOptions = field(default_factory=LoadOptions)
    optimize: OptimizeOptions = field(default_factory=OptimizeOptions)
    equalize: EqualizeOptions = field(default_factory=EqualizeOptions)
    calibrate: CalibrationOptions = field(default_factory=CalibrationOptions)
    simulate: SimulateOptions = field(default_factory=SimulateOptions)
    refine: RefineOptions = field(default_factory=RefineOptions)
    protect: ProtectOptions = field(default_factory=ProtectOptions)
    mix: MixOptions | None = None  # None: all layers have the types of `choose`
    features: Mapping[str, Any] = field(default_factory=dict)
    insert: InsertOptions = field(default_factory=InsertOptions)
    save: SaveOptions = field(default_factory=SaveOptions)
    has_summary: bool = True
    has_warnings: bool = True  # False: Python's UserWarning and ResourceWarning are not shown during the run
    config: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def options_of(self, feature: str) -> Any:
        """The options of a feature of features/order.py; None if it is off."""
        own = {
            "equalization": self.equalize.cross_layer,
            "smooth_quant": self.equalize.smooth,
            "rotation": self.equalize.rotation,
            "bias_correction": self.refine.bias_correction,
            "finetuning": self.refine.finetune,
        }
        return own[feature] if feature in own else self.features.get(feature)

    @property
    def trains(self) -> bool:
        """True if a feature that trains is on."""
        return any(self.options_of(feature.folder) is not None for feature in TRAINING)

    def without_training(self) -> Settings:
        """The same settings without features that train."""
        names = {feature.folder for feature in TRAINING}
        features = {name: options for name, options in self.features.items() if name not in names}
        return replace(self, refine=replace(self.refine, finetune=None), features=features)

    @property
    def needs_data(self) -> bool:
        """True if samples, real or random, affect the result."""
        return self.refine.finetune is not None or self._is_calibrated or bool(self.data_reasons)

    @property
    def data_reasons(self) -> tuple[str, ...]:
        """The reasons why the run is refused without data; empty if it is not. In weight-only quantization, data is
        needed for GPTQ and AWQ only. Other runs omit them without data, and bias correction too."""
        return data_uses(self) if self.insert.matmul_nbits is not None else ()

    @property
    def _is_calibrated(self) -> bool:
        """True if something is measured on the samples, so that all of them are used."""
        if self.equalize.smooth is not None or (self.mix is not None and not self.mix.is_plan_given):
            return True
        choose = self.choose
        layers = [choose.default, *(layer for _, layer in (*choose.by_op_type, *choose.by_node))]
        layers += [] if self.mix is None else self.mix.targets
        layers += [] if choose.ends is None else [choose.ends.layer]
        specs = [spec for layer in layers if layer is not None for spec in (layer.activation, layer.output)]
        specs += [override.spec for override in choose.overrides]
        return not choose.is_weights_only and any(spec is not None and is_measured(spec) for spec in specs)

    @property
    def sample_use(self) -> int | None:
        """The number of samples that are used; None: all, 0: none except for the verdict."""
        cross_layer, correction, finetune = self.equalize.cross_layer, self.refine.bias_correction, self.refine.finetune
        if self._is_calibrated or (finetune is not None and finetune.data_size is None):
            return None
        return max(
            cross_layer.sample_use if cross_layer else 0,
            correction.sample_limit if correction else 0,
            (finetune.data_size or 0) if finetune else 0,
            *(getattr(options, "sample_limit", 0) for options in self.features.values()),
        )

    def for_trials(self, sample_limit: int | None = None) -> Settings:
        """The settings for networks that are only tried out: without features that take long.

        Bias correction stays, with float inputs, and on at most `sample_limit` samples.
        """
        correction = self.refine.bias_correction
        if correction is not None:
            limit = correction.sample_limit if sample_limit is None else sample_limit
            correction = BiasCorrectionOptions(CorrectionInputs.FLOAT, limit)
        return replace(self, refine=RefineOptions(correction), features={})
