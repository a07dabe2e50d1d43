"""Small files of every kind that quark reads, all of them right: what broken ones are made of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from odd_models import loops, recurrent
from onnx_models import conv_bn_relu
from packed_models import marked_model

from quark.features.mixed_precision.plan import LayerPrecision, MixedPlan
from quark.onnx import QConfig, quantize
from quark.onnx.pack import pack_model
from quark.search import Measurement, Stage, Trial

MODELS = ("plain", "external", "packed", "quantized", "blocks", "control", "recurrent")
EXTERNAL_FILE = "weights.bin"
RANGES_KEY = "0" * 64


@dataclass(frozen=True)
class Arrays:
    """What an .npz archive holds."""

    arrays: dict[str, Any]


def sources(folder: Path) -> dict[str, onnx.ModelProto | str | Arrays]:
    """Everything by name: the models of MODELS, texts of JSON, archives. `folder` gets the external data of one."""
    plain = conv_bn_relu()
    onnx.save(conv_bn_relu(), folder / "a.onnx", save_as_external_data=True, location=EXTERNAL_FILE, size_threshold=0)
    onnx.save(marked_model("mxint8", shapes=(((8, 64), 1), ((6, 40), 1))), folder / "b.onnx")
    pack_model(folder / "b.onnx", folder / "c.onnx")
    result = quantize(plain, config="XINT8", use_random_data=True)
    report = json.loads(result.report.to_json())
    layers = (LayerPrecision("a"), LayerPrecision("b"))
    trial = Trial("t", "XINT8", Stage.DIRECT, measured=Measurement(100, 1.0, 2.0), seconds=1.0)
    config = QConfig.get_default_config("MXINT8")
    return {
        "plain": plain,
        "external": onnx.load(folder / "a.onnx", load_external_data=False),
        "packed": onnx.load(folder / "c.onnx"),
        "quantized": result.model,
        "blocks": quantize(conv_bn_relu(), config="MXINT8").model,
        "control": loops(),
        "recurrent": recurrent(),
        "card": json.dumps(report["card"]),
        "report": json.dumps({"plan": report["plan"]}),
        "plan": json.dumps(report["plan"]),
        "mixed plan": MixedPlan(layers, "int16", "int8").with_lowered(["b"]).to_json(),
        "trial": json.dumps(trial.to_dict()),
        "config": json.dumps(_config(folder / "config.json", QConfig.get_default_config("XINT8"))),
        "old config": json.dumps(_config(folder / "old.json", config)),
        "ranges": json.dumps({"key": RANGES_KEY, "ranges": {"x": [-1.0, 2.0, 5], "y": [0.0, 2.0, None]}}),
        "preprocessing": json.dumps({"mean": [1.0, 2.0, 3.0], "std": 2.0, "divisor": 255, "size": 8, "short_side": 9}),
        "layer": Arrays(
            {
                "weight": np.ones((4, 3), np.float32),
                "bias": np.zeros(4, np.float32),
                "numbers": np.array([1.0, 0.5, 20, 0.1]),
                "remark": np.array(""),
            }
        ),
        "samples": Arrays({"x": np.ones((3, 3, 8, 8), np.float32), "labels": np.arange(3)}),
    }


def _config(path: Path, config: Any) -> Any:
    config.save(path)
    return json.loads(path.read_text())
