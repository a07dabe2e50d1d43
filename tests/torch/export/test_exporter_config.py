"""What an exporter can be told."""

from __future__ import annotations

from typing import Any

import pytest

from quark.errors import QuarkError
from quark.torch.export.config.config import ExporterConfig, JsonExporterConfig, OnnxExporterConfig


def test_the_documented_config_builds() -> None:
    config = ExporterConfig(json_export_config=JsonExporterConfig())
    assert config.json_export_config == JsonExporterConfig(weight_format="real_quantized")
    assert config.onnx_export_config is None
    assert ExporterConfig(onnx_export_config=OnnxExporterConfig()) != ExporterConfig()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JsonExporterConfig(weight_format="real"), "Did you mean real_quantized"),
        (lambda: JsonExporterConfig(pack_method="reordered"), "Did you mean reorder"),
        (lambda: JsonExporterConfig(weight_merge_groups=[["q", "k"]]), "weight_merge_groups"),
        (lambda: JsonExporterConfig(kv_cache_group=["k"]), "kv_cache_group"),
        (lambda: ExporterConfig(json_export_config=OnnxExporterConfig()), "expected JsonExporterConfig"),
    ],
)
def test_what_is_not_carried_out_is_refused(make: Any, message: str) -> None:
    with pytest.raises(QuarkError, match=message):
        make()
