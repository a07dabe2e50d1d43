"""Everything a run needs to know, typed and frozen: one value with the options of every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quark.onnx.calibrate.options import CalibrationOptions
from quark.onnx.choose.options import ChoiceOptions
from quark.onnx.choose.specs import is_measured
from quark.onnx.equalize.options import EqualizeOptions
from quark.onnx.insert.options import InsertOptions
from quark.onnx.load.options import LoadOptions
from quark.onnx.mix.options import MixOptions
from quark.onnx.optimize.options import OptimizeOptions
from quark.onnx.protect.options import ProtectOptions
from quark.onnx.refine.options import RefineOptions
from quark.onnx.save.options import SaveOptions
from quark.onnx.simulate.options import SimulateOptions


@dataclass(frozen=True)
class Settings:
    """`config` is the user's own, as JSON can hold it, for the report. `remarks` list the options that were given and
    cannot matter here, each with the reason."""

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
    insert: InsertOptions = field(default_factory=InsertOptions)
    save: SaveOptions = field(default_factory=SaveOptions)
    has_summary: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def needs_data(self) -> bool:
        """True if samples, real or random, affect the result."""
        return self.refine.finetune is not None or self._is_calibrated

    @property
    def _is_calibrated(self) -> bool:
        """That something is measured on the samples, for which all count."""
        if self.equalize.smooth is not None or (self.mix is not None and not self.mix.is_plan_given):
            return True
        choose = self.choose
        layers = [choose.default, *(layer for _, layer in (*choose.by_op_type, *choose.by_node))]
        layers += [] if self.mix is None else [self.mix.low]
        specs = [spec for each in layers if each is not None for spec in (each.activation, each.output)]
        return not choose.is_weights_only and any(spec is not None and is_measured(spec) for spec in specs)

    @property
    def sample_use(self) -> int | None:
        """How many samples are of use; None: all that there are, 0: none but for the verdict."""
        cross_layer, correction, finetune = self.equalize.cross_layer, self.refine.bias_correction, self.refine.finetune
        if self._is_calibrated or (finetune is not None and finetune.data_size is None):
            return None
        return max(
            cross_layer.sample_use if cross_layer else 0,
            correction.sample_limit if correction else 0,
            (finetune.data_size or 0) if finetune else 0,
        )
