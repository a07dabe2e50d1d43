"""Wrong arguments in Python, one row for each: the error's class, and what it has to say.

Each class is also the built-in one that a Python programmer would catch, so that rows name that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broken_checks import OLD, contents, refused
from tiny_models import SIZE, save_brightness_model

from quark.card import Card
from quark.errors import QuarkError
from quark.evaluate import Network, open_dataset
from quark.features.mixed_precision.plan import MixedPlan
from quark.formats import get_format, quantize_dequantize
from quark.inspect.diagnose import diagnose
from quark.onnx import ModelQuantizer, QConfig, QuantizationConfig, get_default_config, quantize
from quark.onnx.pack import pack_model
from quark.onnx.quantization.config.files import load_config
from quark.plan import QuantizationPlan
from quark.search import Budget


@dataclass(frozen=True)
class Mistake:
    name: str
    call: Callable[[Path], Any]
    error: type[Exception]
    words: tuple[str, ...]


def _with(**options: Any) -> Callable[[Path], Any]:
    def call(model: Path) -> Any:
        config = get_default_config("XINT8")
        for name, value in options.items():
            if name in vars(config):
                setattr(config, name, value)
            else:
                config.extra_options[name] = value
        return quantize(model, config=config, use_random_data=True)

    return call


def _model_quantizer(*arguments: Any) -> Callable[[Path], Any]:
    def call(model: Path) -> Any:
        return ModelQuantizer(QConfig.get_default_config("XINT8")).quantize_model(model, *arguments)

    return call


def _both(model: Path) -> Any:
    return _model_quantizer(None, [], model.parent)(model)


X = np.ones((2, 64), np.float32)

MISTAKES = (
    Mistake("model is a number", lambda _: quantize(3), TypeError, ("a path", "got int")),
    Mistake("preset that is none", lambda m: quantize(m, config="XINT9"), ValueError, ("XINT9", "XINT8")),
    Mistake("config is a list", lambda m: quantize(m, config=[1]), TypeError, ("config [1]", "the name of a preset")),
    Mistake("ModelQuantizer of nothing", lambda _: ModelQuantizer(None), TypeError, ("config None", "a QConfig")),
    Mistake("default config that is none", lambda _: QConfig.get_default_config("A8W9"), ValueError, ("A8W9", "A8W8")),
    Mistake("unknown option", _with(CLEStepz=1), ValueError, ("CLEStepz", "CLESteps")),
    Mistake("option of another type", _with(CLESteps="two"), TypeError, ("CLESteps", "'two'", "expected")),
    Mistake("option beyond its limits", _with(Percentile=7), ValueError, ("Percentile", "7", "above 50")),
    Mistake("field of another type", _with(per_channel="yes"), TypeError, ("per_channel", "'yes'")),
    Mistake(
        "unknown calibration", _with(calibrate_method="MinMaxx"), TypeError, ("MinMaxx", "CalibrationMethod.MinMax")
    ),
    Mistake("node that is none", _with(nodes_to_exclude=["nowhere"]), ValueError, ("nowhere", "conv")),
    Mistake("operator that is none", _with(op_types_to_quantize=["Convv"]), ValueError, ("Convv", "Conv")),
    Mistake("unknown field", lambda _: QuantizationConfig(per_chanel=True), TypeError, ("per_chanel",)),  # type: ignore[call-arg]
    Mistake("dictionary of unknown fields", lambda _: QuantizationConfig.from_dict({"a": 1}), ValueError, ("'a'",)),
    Mistake("config file that is none", lambda m: load_config(m.with_name("no.yaml")), ValueError, ("no.yaml",)),
    Mistake("preprocessing that is none", lambda m: quantize(m, m.parent, preprocessing="x"), ValueError, ("'x'",)),
    Mistake("output without a folder", _model_quantizer("/no/such/place.onnx"), ValueError, ("there is no folder",)),
    Mistake("output is a folder", lambda m: _model_quantizer(m.parent)(m), ValueError, ("is a folder",)),
    Mistake("output is the input", lambda m: _model_quantizer(m)(m), ValueError, ("is the input model",)),
    Mistake("reader and path", _both, ValueError, ("calibration_data_reader", "calibration_data_path")),
    Mistake("pack a float model", lambda m: pack_model(m, m.with_name("p.onnx")), ValueError, ("nothing to pack",)),
    Mistake("unknown profile", lambda m: pack_model(m, m.with_name("p.onnx"), "tiny"), ValueError, ("tiny", "native")),
    Mistake("diagnose what is not there", lambda m: diagnose(m, m.with_name("no.onnx")), ValueError, ("no.onnx",)),
    Mistake("network that is not there", lambda m: Network(m.with_name("no.onnx")), ValueError, ("no.onnx",)),
    Mistake("no data", lambda m: open_dataset(m.with_name("no"), Network(m)), ValueError, ("'", "no such folder")),
    Mistake("format that is none", lambda _: get_format("mxint9"), ValueError, ("mxint9", "mxint8")),
    Mistake("axis beyond the rank", lambda _: quantize_dequantize(X, "mxint8", 5), ValueError, ("5",)),
    Mistake("rule that is none", lambda _: quantize_dequantize(X, "mxint8", 1, scale_rule="up"), ValueError, ("'up'",)),
    Mistake("texts to quantize", lambda _: quantize_dequantize(np.array(["a"]), "mxint8", 0), TypeError, ("<U1",)),
    Mistake("plan that is none", lambda _: QuantizationPlan.from_json("[" * 3000), ValueError, ("plan",)),
    Mistake("plan of a number", lambda _: QuantizationPlan.from_json("3"), ValueError, ("plan",)),
    Mistake("mixed plan that is none", lambda _: MixedPlan.from_json('{"layers": 3}'), ValueError, ("layers",)),
    Mistake(
        "mixed plan of odd figures",
        lambda _: MixedPlan.from_json('{"layers": [], "figures": 7}'),
        ValueError,
        ("figures", "7", "expected a list"),
    ),
    Mistake("card that is none", lambda _: Card.from_json("{}"), ValueError, ("card",)),
    Mistake("budget that is none", lambda _: Budget.parse(["size=10"]), ValueError, ("size=10", "size=10MB")),
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_is_told_and_changes_nothing(mistake: Mistake, tmp_path: Path) -> None:
    model = save_brightness_model(tmp_path / "float.onnx")
    (tmp_path / "old.onnx").write_bytes(OLD)
    before = contents(tmp_path)
    refused(lambda: mistake.call(model), mistake.error, mistake.words)
    if "unknown field" not in mistake.name:  # Python's own error for an argument that is not there
        refused(lambda: mistake.call(model), QuarkError, ())
    assert contents(tmp_path) == before


class TestTorch:
    """The road through torch, in one place: torch takes long to import."""

    def test_wrong_arguments_are_told(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        from quark.torch import ModelExporter, ModelQuantizer, export_onnx
        from quark.torch.export import write_onnx
        from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
        from quark.torch.quantization.config.type import Dtype
        from quark.torch.quantization.pipeline import read_plan

        linear = torch.nn.Linear(4, 2)
        config = Config(QuantizationConfig(weight=QuantizationSpec(Dtype.int8)))
        (tmp_path / "plan.json").write_text('{"plan": 3}')
        (tmp_path / "file").touch()
        rows: list[tuple[Callable[[], Any], tuple[str, ...]]] = [
            (lambda: ModelQuantizer(None), ("expected a Config", "NoneType")),
            (lambda: ModelQuantizer(config).quantize_model(3), ("int",)),
            (lambda: ModelQuantizer(config).quantize_model(linear, []), ("data",)),
            (lambda: ModelQuantizer(config).quantize_model(linear, [torch.rand(1, 9)]), ()),
            (lambda: QuantizationSpec("int9"), ("int9",)),
            (lambda: read_plan(tmp_path / "none.json"), ("none.json",)),
            (lambda: read_plan(tmp_path / "plan.json"), ("plan.json", "expected a plan")),
            (lambda: write_onnx(linear, torch.rand(1, 4), tmp_path / "no" / "x.onnx"), ("there is no folder",)),
            (
                lambda: export_onnx(linear, torch.rand(1, 4), tmp_path / "x.onnx"),
                ("output_dir", "got Tensor", "export_onnx(model, output_dir, input_args)"),
            ),
            (lambda: ModelExporter(3), ("ExporterConfig", "int")),
            (
                lambda: ModelExporter(export_dir=tmp_path).export_onnx_model(linear, torch.rand(1, 4), "../x.onnx"),
                ("../x",),
            ),
            (
                lambda: ModelExporter(export_dir=tmp_path / "file").export_onnx_model(linear, torch.rand(1, 4)),
                ("file",),
            ),
        ]
        before = contents(tmp_path)
        for call, words in rows:
            refused(call, QuarkError, words)
        assert contents(tmp_path) == before


def test_a_sample_of_another_size_is_told(tmp_path: Path) -> None:
    model = save_brightness_model(tmp_path / "float.onnx")
    small = np.zeros((1, 3, SIZE - 1, SIZE), np.float32)
    refused(lambda: quantize(model, [small]), ValueError, ("sample 0", "(1, 3, 15, 16)"))
