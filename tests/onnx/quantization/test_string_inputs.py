"""Networks that take strings, as exporters of scikit-learn and of text classifiers make them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_models import Net

from quark.errors import UnsupportedTypeError
from quark.evaluate import Network
from quark.inspect.diagnose import diagnose
from quark.onnx import quantize
from quark.onnx.data.samples import SampleStore

WORDS = ["noun", "verb", "名詞", "*"]


def network() -> onnx.ModelProto:
    """Words become numbers, then scores of classes."""
    net = Net()
    words = net.input("words", ("n", 32), np.str_)
    codes = net.node(
        "LabelEncoder",
        words,
        domain="ai.onnx.ml",
        keys_strings=WORDS,
        values_floats=[0.5, -1.0, 2.0, 0.0],
        default_float=0.0,
        name="codes",
    )
    net.node("MatMul", codes, net.weight(32, 16), output="scores", name="layer")
    model = net.model("scores")
    model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    return model


@pytest.mark.parametrize("preset", ["A8W8", "UINT8_DYNAMIC_QUANT", "MXINT8"])
def test_strings_of_an_archive_are_samples(tmp_path: Path, preset: str) -> None:
    words = np.random.default_rng(0).choice(np.array(WORDS), (16, 32))
    np.savez(tmp_path / "words.npz", words=words)  # of type <U4: objects would need pickle
    report = quantize(network(), tmp_path / "words.npz", preset).report
    assert report.verdict.value == "ok"
    assert any(tensor.tensor for tensor in report.plan)


def test_numbers_are_no_strings() -> None:
    with pytest.raises(UnsupportedTypeError, match=r"the model takes string"):
        quantize(network(), [{"words": np.ones((1, 32), np.float32)}] * 8, "A8W8")


def test_networks_that_take_strings_are_diagnosed(tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "float.onnx")
    words = np.random.default_rng(0).choice(np.array(WORDS), (16, 32))
    np.savez(tmp_path / "words.npz", words=words)
    quantize(tmp_path / "float.onnx", tmp_path / "words.npz", "A8W8").save(tmp_path / "int8.onnx")
    diagnosis = diagnose(tmp_path / "float.onnx", tmp_path / "int8.onnx", tmp_path / "words.npz")
    assert diagnosis.layers


def test_the_same_strings_give_the_same_card(tmp_path: Path) -> None:
    words = np.random.default_rng(0).choice(np.array(WORDS), (16, 32))
    np.savez(tmp_path / "words.npz", words=words)
    made = [quantize(network(), tmp_path / "words.npz", "A8W8").model for _ in range(2)]
    assert made[0].SerializeToString() == made[1].SerializeToString()
    np.savez(tmp_path / "words.npz", words=words[::-1])
    assert quantize(network(), tmp_path / "words.npz", "A8W8").model.metadata_props != made[0].metadata_props


def test_strings_stay_in_memory_however_many_they_are() -> None:
    store = SampleStore(memory_bytes=100)
    samples = [{"words": np.full((1, 32), f"{index}", object)} for index in range(3)]
    for sample in samples:
        store.append(sample)
    assert all((store[index]["words"] == sample["words"]).all() for index, sample in enumerate(samples))


def test_a_network_that_takes_strings_is_run_for_a_report(tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "float.onnx")
    assert [port.dtype for port in Network(tmp_path / "float.onnx").inputs] == [np.dtype(object)]
