"""Every public name stands where scripts import it from."""

from __future__ import annotations

import importlib

import pytest

CONFIG = "quark.torch.quantization.config"
OBSERVER = "quark.torch.quantization.observer"
NAMES = {
    f"{CONFIG}.config": "Config QuantizationConfig QuantizationSpec QConfig QLayerConfig QTensorConfig TQTSpec "
    "Int8PerTensorSpec Int8PerChannelSpec Int4PerGroupSpec Uint8PerTensorSpec Uint4PerGroupSpec Int3PerGroupSpec "
    "Float16Spec Bfloat16Spec OCP_MXFP4Spec OCP_MXFP6E2M3Spec OCP_MXFP6E3M2Spec OCP_MXFP8E4M3Spec OCP_MXFP8E5M2Spec "
    "OCP_MXINT8Spec MX4Spec MX6Spec MX9Spec BFP16Spec CLEConfig BiasCorrectionConfig",
    f"{CONFIG}.type": "Dtype QSchemeType ScaleType RoundType QuantizationMode TQTThresholdInitMeth ZeroPointType",
    f"{CONFIG}.algorithm": "CLEConfig BiasCorrectionConfig AWQConfig GPTQConfig SmoothQuantConfig",
    f"{OBSERVER}.observer": "PerTensorMinMaxObserver PerTensorHistogramObserver PerTensorPercentileObserver "
    "PerTensorMSEObserver PerTensorPowOf2MinMaxObserver PerTensorPowOf2MinMSEObserver "
    "PerTensorPowOf2NonOverflowObserver PerChannelMinMaxObserver PerChannelPowOf2MinMaxObserver PerBlockMXObserver "
    "PerBlockBFPObserver",
    f"{OBSERVER}.tqt_observer": "TQTObserver",
    f"{OBSERVER}.lsq_observer": "LSQObserver",
    "quark.torch.export.config.config": "ExporterConfig JsonExporterConfig OnnxExporterConfig",
    "quark.common.utils.import_utils": "export_for_training",
}
MEMBERS = {
    "Dtype": "int2 int4 int8 int16 int32 uint2 uint4 uint8 uint16 uint32 float16 bfloat16 fp8_e4m3 fp8_e5m2 fp6_e3m2 "
    "fp6_e2m3 fp4 mx mx4 mx6 mx9 bfp16",
    "QSchemeType": "per_tensor per_channel per_group",
    "ScaleType": "float float32 float16 bfloat16 pof2",
    "RoundType": "round floor half_even",
    "QuantizationMode": "eager_mode fx_graph_mode",
    "TQTThresholdInitMeth": "_3SD _KL_J",
}


@pytest.mark.parametrize(("module", "names"), NAMES.items(), ids=str)
def test_names_are_where_they_are_imported_from(module: str, names: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(loaded, name)] == []


@pytest.mark.parametrize(("name", "members"), MEMBERS.items(), ids=str)
def test_enumerations_have_their_members(name: str, members: str) -> None:
    enumeration = getattr(importlib.import_module(f"{CONFIG}.type"), name)
    assert [part for part in members.split() if part not in enumeration.__members__] == []


def test_newer_names_are_the_same_things() -> None:
    config = importlib.import_module(f"{CONFIG}.config")
    assert config.QTensorConfig is config.QuantizationSpec
    assert config.QLayerConfig is config.QuantizationConfig
    assert config.QConfig is config.Config
