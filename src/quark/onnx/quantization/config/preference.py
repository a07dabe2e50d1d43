"""QuantizationPreference: the effect of 'accuracy', 'speed' or 'resource_efficiency' on the other extra options.

It changes settings of calibration and finetuning, including those that were given, because a preference overrides them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quark.errors import InvalidValueError
from quark.onnx.quantization.config.config import QuantizationConfig
from quark.onnx.quantization.config.quant_types import LayerWiseMethod, PowerOfTwoMethod
from quark.onnx.quantization.config.spec import CalibMethod, QTensorConfig, ScaleType

OPTION = "QuantizationPreference"
PREFERENCES = ("accuracy", "speed", "resource_efficiency")
_HISTOGRAM_BINS = 2048
_MOST_WORKERS = 8
# Options for the memory and processors of AMD's calibration; ours streams, so they have no effect here.
_WITHOUT_EFFECT = ("NumBins", "CalibOptimizeMem", "CalibWorkerNum")


def preferred_options(method: Any, has_finetuning: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    """The extra options that the preference among them sets, with the values that it sets."""
    preference = options.get(OPTION)
    if preference is None:
        return {}
    if preference not in PREFERENCES:
        raise InvalidValueError(f"option '{OPTION}' = {preference!r}: expected one of {', '.join(PREFERENCES)}")
    changes = _of_calibration(preference, method, options)
    if has_finetuning:
        finetune = dict(options.get("FastFinetune", {}))
        changes["FastFinetune"] = {**finetune, **_of_finetuning(preference, finetune)}
    return changes


def _of_calibration(preference: str, method: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    is_min_mse = method is PowerOfTwoMethod.MinMSE
    is_all = options.get("MinMSEModePof2Scale", "All") == "All"
    if preference == "accuracy":
        return {"MinMSEModePof2Scale": "All"} if is_min_mse and not is_all else {}
    if is_min_mse and is_all and not options.get("NumBins"):
        changes["NumBins"] = _HISTOGRAM_BINS
    if method is LayerWiseMethod.LayerWisePercentile and not options.get("LWPUseHistogram", True):
        changes["LWPUseHistogram"] = True
    changes["CalibOptimizeMem"] = preference == "resource_efficiency"
    if options.get("CalibWorkerNum") != 1:
        changes["CalibWorkerNum"] = 1 if preference == "resource_efficiency" else _workers()
    return changes


def _of_finetuning(preference: str, given: Mapping[str, Any]) -> dict[str, Any]:
    if preference == "accuracy":
        return {"UpdateBias": True, "OutputQDQ": True, **({"EarlyStop": False} if given.get("EarlyStop") else {})}
    if preference == "speed":
        workers = {"NumWorkers": _workers()} if given.get("NumWorkers", 1) == 1 else {}
        return {"EarlyStop": True, "MemOptLevel": 0, **workers}
    return {"MemOptLevel": 2, **({"NumWorkers": 1} if given.get("NumWorkers", 1) > 1 else {})}


def _workers() -> int:
    return min(multiprocessing.cpu_count(), _MOST_WORKERS)


def with_preference(
    run: QuantizationConfig, inputs: QTensorConfig | None = None
) -> tuple[QuantizationConfig, list[str]]:
    """The config with the options that its preference sets, and a remark that names them. Of a QConfig, `inputs` is the
    spec of activations, which has the method of calibration."""
    preference = run.extra_options.get(OPTION)
    if preference is None:
        return run, []
    method = run.calibrate_method if inputs is None else _method_of(inputs)
    wanted = preferred_options(method, run.include_fast_ft, run.extra_options)
    before = run.extra_options
    finetune = {key: value for key, value in wanted.pop("FastFinetune", {}).items() if key != "NumWorkers"}
    old = before.get("FastFinetune", {})
    changes = {
        name: value for name, value in wanted.items() if name not in _WITHOUT_EFFECT and before.get(name) != value
    }
    told = [f"{name} = {value}" for name, value in changes.items()]
    told += [f"FastFinetune.{key} = {value}" for key, value in finetune.items() if old.get(key) != value]
    if finetune:
        changes["FastFinetune"] = {**old, **finetune}
    what = (
        f"sets {', '.join(told)}"
        if told
        else "the settings of calibration and finetuning are already the ones it selects"
    )
    return replace(run, extra_options={**before, **changes}), [f"{OPTION} '{preference}': {what}"]


def _method_of(tensor: QTensorConfig) -> Any:
    if tensor.scale_type is ScaleType.PowerOf2 and tensor.calibration_method is CalibMethod.MinMSE:
        return PowerOfTwoMethod.MinMSE
    is_layerwise = tensor.calibration_method is CalibMethod.LayerwisePercentile
    return LayerWiseMethod.LayerWisePercentile if is_layerwise else None
