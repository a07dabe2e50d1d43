"""`quark debug`: the first layer where two models diverge."""

from __future__ import annotations

import json
import re

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from diagnosed_networks import images, quantized_model, with_larger_weight

from quark.cli.debug_command import debug
from quark.cli.errors import ErrorReportingGroup
from quark.demo import network_path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("debug")
    np.savez(place / "data.npz", input=images())
    model = quantized_model("A8W8")
    onnx.save(model, place / "good.onnx")
    names = [node.name for node in model.graph.node if node.op_type == "Conv"]
    onnx.save(with_larger_weight(model, names[3], 5.0), place / "bad.onnx")
    (place / "name").write_text(names[3])
    return place


def run(*arguments):
    group = ErrorReportingGroup("quark")
    group.commands["debug"] = debug
    return CliRunner().invoke(group, ["debug", *map(str, arguments)])


def test_the_damaged_layer_is_named(folder):
    result = run(network_path(), folder / "bad.onnx", "--calib", folder / "data.npz", "--num", 4, "--no-try")
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert f"they diverge at Conv '{(folder / 'name').read_text()}'" in text
    assert "this layer is the cause" in text
    assert "what to try (not tried):" in text
    assert "local dB" in text
    assert re.search(r"(degraded|collapsed): output 'logits' \(classes\): [\w ]+ -?[\d.]+", text)


def test_suggestions_are_tried(folder):
    """Quantized again, the network is as good as it was before a layer of it was damaged."""
    result = run(network_path(), folder / "bad.onnx", "--calib", folder / "data.npz", "--num", 8)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "suggestion: quantize again with the same configuration and these samples; measured: collapsed -> " in text
    assert "suggestions were tried" in text
    assert "not tried)" not in text


def test_where_none_is_below_the_greatest_loss_is_told(folder):
    result = run(network_path(), folder / "good.onnx", "--calib", folder / "data.npz", "--num", 4, "--below", 1)
    assert result.exit_code == 0
    assert "no layer is below 1 dB; most is lost at" in " ".join(result.output.split())


def test_equal_models_do_not_diverge(folder):
    result = run(network_path(), network_path(), "--calib", folder / "data.npz", "--num", 2)
    assert result.exit_code == 0
    assert "they do not diverge" in result.output


def test_json(folder):
    result = run(network_path(), folder / "bad.onnx", "--calib", folder / "data.npz", "--num", 4, "--json")
    content = json.loads(result.output)
    assert content["divergence"]["layer"] == (folder / "name").read_text()
    assert content["diagnosis"]["layers"][content["divergence"]["index"]]["name"] == content["divergence"]["layer"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("good.onnx", None), "give the float model first"),
        ((None, "missing.onnx"), "no such file"),
        (("good.onnx", "bad.onnx"), "'good.onnx' is quantized: expected the float model"),
    ],
    ids=["swapped", "missing", "both quantized"],
)
def test_what_cannot_be_compared(folder, arguments, message):
    paths = [network_path() if name is None else folder / name for name in arguments]
    result = run(*paths, "--calib", folder / "data.npz")
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())


def test_names_do_not_steer_the_terminal(folder, tmp_path):
    for source, name in ((network_path(), "float.onnx"), (folder / "bad.onnx", "small.onnx")):
        proto = onnx.load(source)
        for node in proto.graph.node:
            node.name = f"\x1b[2J{node.name}"
        onnx.save(proto, tmp_path / name)
    result = run(tmp_path / "float.onnx", tmp_path / "small.onnx", "--calib", folder / "data.npz", "--num", 2)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert "\\x1b[2J" in result.stdout
