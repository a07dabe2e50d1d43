"""`quark reproduce` on exports of torch modules: what is given is held against the card, and the bytes are equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from quark.cli.main import main
from quark.errors import UnsupportedOptionError
from quark.onnx.quantization.reproduction import reproduce
from quark.torch import ModelExporter, ModelQuantizer, export_onnx, simulate_runtime
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype

SCRIPT = """
import torch
from torch import nn

def module(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    ).eval()

def other():
    return module(1)

def data():
    return torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))

def both():
    return module(), list(data().split(4))
"""
INT8 = QuantizationSpec(Dtype.int8)
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def made_by(script: Path) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(script.read_text(), names)
    return names


def quantized(script: Path) -> Any:
    module, data = made_by(script)["both"]()
    return ModelQuantizer(Config(QuantizationConfig(INT8, INT8, INT8))).quantize_model(module, data)


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(main, ["reproduce", *map(str, arguments)])


def trained(network: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(network.train().parameters(), 0.01)
    network(X).square().sum().backward()
    optimizer.step()
    return network.eval()


@pytest.mark.parametrize("suffix", [".onnx", ".json"])
def test_a_calibrated_module_gives_the_same_bytes(script: Path, tmp_path: Path, suffix: str) -> None:
    path = ModelExporter(export_dir=tmp_path).export_onnx_model(quantized(script), X, "small.onnx")
    again = tmp_path / "again" / "small.onnx"
    again.parent.mkdir()
    result = run(path.with_suffix(suffix), "--module", f"{script}:both", "--output", again)
    assert result.exit_code == 0, result.output
    assert again.read_bytes() == path.read_bytes()
    assert json.loads(again.with_suffix(".json").read_text())["card"]["command"].startswith(
        "quark reproduce small.json"
    )


@pytest.mark.parametrize("kind", ["double", "bfloat16"])
def test_a_module_of_another_type_gives_the_same_bytes(tmp_path: Path, kind: str) -> None:
    """ONNX Runtime computes little in these types, so that it was converted for the export."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "def both():\n"
        "    torch.manual_seed(0)\n"
        f"    return torch.nn.Linear(8, 4).{kind}().eval(), [torch.ones(2, 8).{kind}()]\n"
    )
    module, data = made_by(script)["both"]()
    network = ModelQuantizer(Config(QuantizationConfig(INT8, INT8, INT8))).quantize_model(module, data)
    path = export_onnx(network, tmp_path, data[0], check=False).path
    result = run(path, "--module", f"{script}:both")
    assert result.exit_code == 0, result.output


def test_options_of_the_export_are_in_the_card(script: Path, tmp_path: Path) -> None:
    network = simulate_runtime(quantized(script))
    path = export_onnx(network, tmp_path, X, 20, ["pixels"], ["classes"], dynamic_batch=False, check=False).path
    result = run(path, "--module", f"{script}:both")
    assert result.exit_code == 0, result.output


def test_arrays_can_take_the_place_of_the_loader(script: Path, tmp_path: Path) -> None:
    path = export_onnx(quantized(script), tmp_path, X, check=False).path
    np.savez(tmp_path / "data.npz", input=made_by(script)["data"]().numpy())
    assert run(path, "--module", f"{script}:module").exit_code == 1
    assert run(path, "--module", f"{script}:module", "--calib", tmp_path / "data.npz").exit_code == 0


def test_a_trained_module_needs_its_state(script: Path, tmp_path: Path) -> None:
    network = trained(quantized(script))
    path = export_onnx(network, tmp_path, X, check=False).path
    refused = run(path, "--module", f"{script}:both")
    assert (refused.exit_code, "--state" in refused.output) == (1, True)
    torch.save(network.state_dict(), tmp_path / "state.pt")
    assert run(path, "--module", f"{script}:both", "--state", tmp_path / "state.pt").exit_code == 0
    torch.save(trained(network).state_dict(), tmp_path / "state.pt")
    later = run(path, "--module", f"{script}:both", "--state", tmp_path / "state.pt")
    assert (later.exit_code, "other numbers than the card's" in later.output) == (3, True)


def test_another_module_other_data_and_none_are_named(script: Path, tmp_path: Path) -> None:
    path = export_onnx(quantized(script), tmp_path, X, check=False).path
    np.savez(tmp_path / "data.npz", input=np.zeros((8, 3, 8, 8), np.float32))
    cases: dict[str, list[Any]] = {
        "give a function that returns it": [],
        "is not the card's: its state has": ["--module", f"{script}:other"],
        "calibrated on 8 samples": ["--module", f"{script}:module"],
        "other values in them": ["--module", f"{script}:module", "--calib", tmp_path / "data.npz"],
        "returned Tensor: expected the float module": ["--module", f"{script}:data"],
    }
    for fragment, arguments in cases.items():
        result = run(path, *arguments)
        assert result.exit_code == 1, (fragment, result.output)
        assert fragment in " ".join(result.output.split()), result.output


def test_what_is_read_is_not_overwritten(script: Path, tmp_path: Path) -> None:
    path = export_onnx(quantized(script), tmp_path, X, check=False).path
    data, before = tmp_path / "data.npz", script.read_text()
    np.savez(data, input=made_by(script)["data"]().numpy())
    kept = data.read_bytes()
    for output in (script, data, path):
        result = run(path, "--module", f"{script}:module", "--calib", data, "--output", output)
        assert result.exit_code == 1, result.output
    assert (script.read_text(), data.read_bytes()) == (before, kept)


@pytest.mark.parametrize(
    "code", ["raise SystemExit(0)", "def f():\n    raise SystemExit(0)", "def f():\n    raise ValueError('no file')"]
)
def test_a_script_that_fails_is_no_success(script: Path, tmp_path: Path, code: str) -> None:
    path = export_onnx(quantized(script), tmp_path, X, check=False).path
    script.write_text(code)
    result = run(path, "--module", f"{script}:f")
    assert result.exit_code == 1, result.output
    assert "failed" in result.output
    assert "this should not happen" not in result.output


def test_what_a_card_cannot_hold_is_named(script: Path, tmp_path: Path) -> None:
    module, data = made_by(script)["both"]()
    shapes = {"input": {0: "n"}}
    network = ModelQuantizer(Config(QuantizationConfig(INT8, weight=INT8))).quantize_model(
        module, data, dynamic_shapes=shapes
    )
    path = export_onnx(network, tmp_path, X, check=False).path
    result = run(path, "--module", f"{script}:both")
    assert (result.exit_code, "dynamic_shapes, which a card cannot hold" in result.output) == (1, True)
    with pytest.raises(UnsupportedOptionError, match="of a torch module"):
        reproduce(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("inputs", {"input": ["float32", [0]]}),
        ("inputs", {"input": ["nn", [1]]}),
        ("inputs", {"input": ["float32", [1_000_000] * 6]}),
        ("inputs", {}),
        ("options", {"path": "/"}),
        ("options", {"opset": "x"}),
        ("options", {"wanted": {}}),
        ("options", {"wanted": 10**9}),
        ("options", {"dynamic_batch": "no"}),
        ("options", {"inputs": {"x": 1}}),
        ("options", {"names": 1}),
        ("state_sha256", "x"),
    ],
)
def test_a_card_with_a_strange_field_is_refused(script: Path, tmp_path: Path, field: str, value: Any) -> None:
    path = export_onnx(quantized(script), tmp_path, X, check=False).path
    card = json.loads(path.with_suffix(".json").read_text())["card"]
    value = {**card["torch"]["options"], **value} if field == "options" else value
    path.with_suffix(".json").write_text(json.dumps({"card": {**card, "torch": {**card["torch"], field: value}}}))
    result = run(path.with_suffix(".json"), "--module", f"{script}:both")
    assert result.exit_code == 1
    assert "this should not happen" not in result.output
    assert (field in result.output) or ("example input has nothing" in result.output)


@pytest.mark.parametrize(
    "request_of_card", [{"help": True}, {"export_dir": "/"}, {"resume": True}, {"workers": 10**6}, {"device": "cuda"}]
)
def test_a_request_says_what_affects_the_bytes_and_no_more(
    script: Path, tmp_path: Path, request_of_card: dict[str, Any]
) -> None:
    path = export_onnx(quantized(script), tmp_path, X, check=False).path
    card = json.loads(path.with_suffix(".json").read_text())["card"]
    card["torch"]["request"] = {"model_name": "resnet18", **request_of_card}
    path.with_suffix(".json").write_text(json.dumps({"card": card}))
    places = ("--float", script, "--calib", tmp_path)
    result = run(path.with_suffix(".json"), *places)  # an exit status of 0 says that the bytes are the same
    assert (result.exit_code, "torch.request" in result.output) == (1, True), result.output
    for option in ("--module", "--state"):
        refused = run(path.with_suffix(".json"), *places, option, script)
        assert (refused.exit_code, "leave --module and --state out" in refused.output) == (2, True), refused.output
