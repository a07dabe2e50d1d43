"""Quantization of ONNX models.

    quantize                    a model, some data and the name of a preset in, a quantized model and its report out
    auto_quantize               the same with the preset that suits the model, which is found by trying
    ModelQuantizer              the same by the interface that scripts written for AMD Quark call
    QuantizationConfig, QConfig, get_default_config      what to do; presets by name
    get_library_path            the compiled operators, for `SessionOptions.register_custom_ops_library`
    read_plan                   the tensors, formats and scales that a quantized model has
    add_portable_functions      makes a model with these operators run without that library

torch is not needed, and not imported. ONNX Runtime is: which of its distributions is the user's choice.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quark.onnx.runtime import require_onnxruntime

require_onnxruntime()  # before what imports it

from quark.onnx.operators.custom_ops import _COP_DOMAIN, _COP_VERSION  # noqa: E402
from quark.onnx.quant_utils import (  # noqa: E402
    CalibrationDataReader,
    CalibrationMethod,
    ExtendedCalibrationMethod,
    ExtendedQuantFormat,
    ExtendedQuantType,
    Int16Method,
    LayerWiseMethod,
    PowerOfTwoMethod,
    QuantFormat,
    QuantType,
    VitisQuantFormat,
    VitisQuantType,
)
from quark.onnx.quantization.config import Config, QConfig, QuantizationConfig, get_default_config  # noqa: E402
from quark.onnx.quantization.config.algorithm import (  # noqa: E402
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
    AutoMixprecisionConfig,
    BiasCorrectionConfig,
    CLEConfig,
    DistillationConfig,
    GPTQConfig,
    QuarotConfig,
    SmoothQuantConfig,
)
from quark.onnx.quantization.config.data_type import (  # noqa: E402
    BFP16,
    BFloat16,
    DataType,
    Float16,
    Int8,
    Int16,
    Int32,
    UInt8,
    UInt16,
    UInt32,
)
from quark.onnx.quantization.config.spec import (  # noqa: E402
    BFloat16Spec,
    BFP16Spec,
    CalibMethod,
    Float16Spec,
    FP8E4M3Spec,
    FP8E5M2Spec,
    Int4Spec,
    Int8Spec,
    Int16Spec,
    Int32Spec,
    MX4Spec,
    MX6Spec,
    MX9Spec,
    MXFP4E2M1Spec,
    MXFP6E2M3Spec,
    MXFP6E3M2Spec,
    MXFP8E4M3Spec,
    MXFP8E5M2Spec,
    MXInt8Spec,
    NVFP4Spec,
    QLayerConfig,
    QTensorConfig,
    QuantGranularity,
    ScaleType,
    UInt4Spec,
    UInt8Spec,
    UInt16Spec,
    UInt32Spec,
    XInt8Spec,
)
from quark.ops.library import get_library_path  # noqa: E402
from quark.ops.portable_functions import add_portable_functions  # noqa: E402

if TYPE_CHECKING:
    from quark.onnx.calibration import create_calibrator_float_scale, create_calibrator_power_of_two
    from quark.onnx.data import CachedDataReader, PathDataReader, Preprocessing, RandomDataReader
    from quark.onnx.dumping import dump_model
    from quark.onnx.plan_reader import read_plan
    from quark.onnx.quantization.auto_search import (
        AutoSearch,
        AutoSearchPro,
        SearchSpace,
        generate_all_configs,
        get_auto_search_config,
    )
    from quark.onnx.quantization.quantize import quantize_dynamic, quantize_static
    from quark.onnx.quantization.quantizer import ModelQuantizer, QuantizedModel, quantize
    from quark.search import auto_quantize

# Functions on graphs are loaded on first use, because importing them takes longer than all of the above. Some names
# that scripts import from here are ONNX Runtime's own.
_LAZY = {
    "AutoSearch": "quark.onnx.quantization.auto_search",
    "AutoSearchPro": "quark.onnx.quantization.auto_search",
    "CachedDataReader": "quark.onnx.data",
    "CalibraterBase": "onnxruntime.quantization.calibrate",
    "MinMaxCalibrater": "onnxruntime.quantization.calibrate",
    "ModelQuantizer": "quark.onnx.quantization.quantizer",
    "PathDataReader": "quark.onnx.data",
    "Preprocessing": "quark.onnx.data",
    "QuantizationMode": "onnxruntime.quantization.quant_utils",
    "QuantizedModel": "quark.onnx.quantization.quantizer",
    "RandomDataReader": "quark.onnx.data",
    "SearchSpace": "quark.onnx.quantization.auto_search",
    "auto_quantize": "quark.search",
    "create_calibrator_float_scale": "quark.onnx.calibration",
    "create_calibrator_power_of_two": "quark.onnx.calibration",
    "dump_model": "quark.onnx.dumping",
    "generate_all_configs": "quark.onnx.quantization.auto_search",
    "get_auto_search_config": "quark.onnx.quantization.auto_search",
    "quantize": "quark.onnx.quantization.quantizer",
    "quantize_dynamic": "quark.onnx.quantization.quantize",
    "quantize_static": "quark.onnx.quantization.quantize",
    "read_plan": "quark.onnx.plan_reader",
    "write_calibration_table": "onnxruntime.quantization.quant_utils",
}

__all__ = [
    "BFP16",
    "_COP_DOMAIN",
    "_COP_VERSION",
    "AdaQuantConfig",
    "AdaRoundConfig",
    "AlgoConfig",
    "AutoMixprecisionConfig",
    "AutoSearch",
    "AutoSearchPro",
    "BFP16Spec",
    "BFloat16",
    "BFloat16Spec",
    "BiasCorrectionConfig",
    "CLEConfig",
    "CachedDataReader",
    "CalibMethod",
    "CalibrationDataReader",
    "CalibrationMethod",
    "Config",
    "DataType",
    "DistillationConfig",
    "ExtendedCalibrationMethod",
    "ExtendedQuantFormat",
    "ExtendedQuantType",
    "FP8E4M3Spec",
    "FP8E5M2Spec",
    "Float16",
    "Float16Spec",
    "GPTQConfig",
    "Int4Spec",
    "Int8",
    "Int8Spec",
    "Int16",
    "Int16Method",
    "Int16Spec",
    "Int32",
    "Int32Spec",
    "LayerWiseMethod",
    "MX4Spec",
    "MX6Spec",
    "MX9Spec",
    "MXFP4E2M1Spec",
    "MXFP6E2M3Spec",
    "MXFP6E3M2Spec",
    "MXFP8E4M3Spec",
    "MXFP8E5M2Spec",
    "MXInt8Spec",
    "ModelQuantizer",
    "NVFP4Spec",
    "PathDataReader",
    "PowerOfTwoMethod",
    "Preprocessing",
    "QConfig",
    "QLayerConfig",
    "QTensorConfig",
    "QuantFormat",
    "QuantGranularity",
    "QuantType",
    "QuantizationConfig",
    "QuantizedModel",
    "QuarotConfig",
    "RandomDataReader",
    "ScaleType",
    "SearchSpace",
    "SmoothQuantConfig",
    "UInt4Spec",
    "UInt8",
    "UInt8Spec",
    "UInt16",
    "UInt16Spec",
    "UInt32",
    "UInt32Spec",
    "VitisQuantFormat",
    "VitisQuantType",
    "XInt8Spec",
    "add_portable_functions",
    "auto_quantize",
    "create_calibrator_float_scale",
    "create_calibrator_power_of_two",
    "dump_model",
    "generate_all_configs",
    "get_auto_search_config",
    "get_default_config",
    "get_library_path",
    "quantize",
    "quantize_dynamic",
    "quantize_static",
    "read_plan",
]


def __getattr__(name: str) -> Any:
    if name.endswith("_QCONFIG"):  # a new one each time, because scripts may change it
        return getattr(import_module("quark.onnx.quantization.config.custom_config"), name)
    if name == "auto_search":  # a module
        return import_module("quark.onnx.auto_search")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
