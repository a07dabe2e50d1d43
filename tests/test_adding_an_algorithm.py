"""The feature of docs/adding_an_algorithm.md works when its folder and its line are put where the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quark.features.order

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```py\n# (.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FEATURES, ORDER = "src/quark/features/", "src/quark/features/order.py"

# The page's folder joins the package, and its order.py replaces the real one, before anything else is imported.
PROLOGUE = """
import importlib.util, sys
import quark.features
quark.features.__path__.append({folder!r})
spec = importlib.util.spec_from_file_location("quark.features.order", {folder!r} + "/order.py")
quark.features.order = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quark.features.order)
"""

NETWORKS = """
import numpy as np
import torch
from torch import nn
from onnx_models import Net
torch.manual_seed(0)
torch.set_num_threads(1)
net = Net()
x = net.input("x", (1, 3, 8, 8))
model = net.model(net.node("Relu", net.conv(x, (3, 4), name="conv")))
images = list(np.random.default_rng(0).standard_normal((8, 1, 3, 8, 8)).astype(np.float32))
module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()
loader = [torch.from_numpy(each) for each in images]
"""

CHECKS = """
from onnx import numpy_helper
from quark.report.algorithms import algorithm_line

facts = next(each for each in result.report.algorithms if each.name == "weight mean correction")
print(algorithm_line(facts))
print([algorithm_line(each) for each in network.algorithms])


def weight_of(model):
    arrays = (numpy_helper.to_array(each) for each in model.graph.initializer)
    return next(each for each in arrays if each.ndim == 4).astype(np.float64)


def channel_means(quantized):
    scale = next(each.choice.scale for each in quantized.plan if each.role.value == "weight")
    return (weight_of(quantized.model) * scale[0]).mean(axis=(1, 2, 3))


exact = weight_of(model).mean(axis=(1, 2, 3))
plain = quantize(model, images, QuantizationConfig())
after, before = (np.abs(channel_means(each) - exact).mean() for each in (result, plain))
assert after < before, (after, before)
"""


@pytest.fixture(scope="module")
def blocks() -> dict[str, str]:
    return dict(BLOCK.findall((ROOT / "docs" / "adding_an_algorithm.md").read_text(encoding="utf-8")))


@pytest.fixture
def folder(blocks: dict[str, str], tmp_path: Path) -> Path:
    for path, text in blocks.items():
        if path.startswith(FEATURES) and path != ORDER:
            target = tmp_path / path.removeprefix(FEATURES)
            target.parent.mkdir(exist_ok=True)
            target.write_text(text)
    source = Path(quark.features.order.__file__).read_text()
    assert source.count("ORDER = (\n") == 1
    (tmp_path / "order.py").write_text(source.replace("ORDER = (\n", f"ORDER = (\n{blocks[ORDER]}"))
    return tmp_path


def run(folder: Path, program: str) -> str:
    program = PROLOGUE.format(folder=str(folder)) + program
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_has_one_folder_and_one_line(blocks: dict[str, str]) -> None:
    folders = {path.removeprefix(FEATURES).split("/")[0] for path in blocks if path.startswith(FEATURES)}
    assert folders == {"weight_means", "order.py"}
    assert len(blocks[ORDER].splitlines()) == 1


def test_the_feature_runs_on_both_roads(blocks: dict[str, str], folder: Path) -> None:
    printed = run(folder, NETWORKS + blocks["try it"] + CHECKS).splitlines()
    assert printed[0] == "weight mean correction: 1 weight"
    assert "weight mean correction: 2 weights" in printed[1]


def test_its_options_are_checked_like_all_others(folder: Path) -> None:
    program = """
from quark.onnx import QuantizationConfig
from quark.onnx.quantization.config.options import settings_of
for options in ({"WeightMeanCorrection": True, "WeightMeanShare": 2.0}, {"WeightMeanCorrection": 3}):
    try:
        settings_of(QuantizationConfig(extra_options=options))
    except (ValueError, TypeError) as error:
        print(error)
print(settings_of(QuantizationConfig(extra_options={"WeightMeanShare": 0.5})).remarks)
"""
    first, second, third = run(folder, program).splitlines()
    assert first == "WeightMeanShare 2.0: expected a number from 0 to 1"
    assert second.startswith("option 'WeightMeanCorrection': 3 has type int, expected True or False")
    assert "WeightMeanShare: WeightMeanCorrection is False" in third
