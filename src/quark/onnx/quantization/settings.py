"""Everything a run needs to know, typed and frozen: one value with the options of every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quark.onnx.calibrate.options import CalibrationOptions
from quark.onnx.choose.options import ChoiceOptions
from quark.onnx.insert.options import InsertOptions
from quark.onnx.load.options import LoadOptions
from quark.onnx.optimize.options import OptimizeOptions
from quark.onnx.save.options import SaveOptions


@dataclass(frozen=True)
class Settings:
    """`config` is the user's own, as JSON can hold it, for the report. `remarks` list the options that were given and
    cannot matter here, each with the reason."""

    choose: ChoiceOptions
    name: str = "custom"
    load: LoadOptions = field(default_factory=LoadOptions)
    optimize: OptimizeOptions = field(default_factory=OptimizeOptions)
    calibrate: CalibrationOptions = field(default_factory=CalibrationOptions)
    insert: InsertOptions = field(default_factory=InsertOptions)
    save: SaveOptions = field(default_factory=SaveOptions)
    has_summary: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
