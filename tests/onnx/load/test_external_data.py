"""External data: found, mapped, hashed; and never outside the model's folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_models import Net, random_feed, run_model

from quark.errors import ModelError
from quark.onnx.load import load
from quark.onnx.quantization.reproduction import file_hash

SIZE = 64


def _net() -> onnx.ModelProto:
    net = Net()
    net.input("x", (2, SIZE))
    return net.model(net.node("MatMul", "x", net.weight(SIZE, SIZE, name="w"), output="y"))


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    onnx.save(_net(), folder / "net.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    return folder / "net.onnx"


def _spoil(path: Path, **entries: str) -> None:
    """Change what the model says about the external data of its weight."""
    model = onnx.load(path, load_external_data=False)
    tensor = model.graph.initializer[0]
    known = {entry.key: entry.value for entry in tensor.external_data} | entries
    del tensor.external_data[:]
    for key, value in known.items():
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())


def _refused(path: Path, *words: str) -> None:
    content = path.read_bytes()
    with pytest.raises(ModelError) as caught:
        load(path)
    for word in ("'w'", *words):
        assert word in str(caught.value)
    assert path.read_bytes() == content


def test_it_is_read_and_counted(model_path: Path) -> None:
    loaded = load(model_path)
    weights = model_path.with_name("weights.bin").read_bytes()
    assert loaded.bytes == model_path.stat().st_size + len(weights)
    digest = hashlib.sha256(weights).digest()
    assert loaded.sha256 == hashlib.sha256(model_path.read_bytes() + digest).hexdigest()
    model = _net()
    feed = random_feed(model)
    got = run_model(ir.serde.serialize_model(loaded.model), feed)
    np.testing.assert_array_equal(got["y"], run_model(model, feed)["y"])


def test_the_hash_of_several_files_does_not_depend_on_their_order_in_the_model(tmp_path: Path) -> None:
    net = Net()
    net.input("x", (2, SIZE))
    hidden = net.node("MatMul", "x", net.weight(SIZE, SIZE, name="b"))
    model = net.model(net.node("MatMul", hidden, net.weight(SIZE, SIZE, name="a"), output="y"))
    path = tmp_path / "net.onnx"
    onnx.save(model, path, save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0)
    assert [tensor.name for tensor in onnx.load(path).graph.initializer] == ["b", "a"]
    digests = [hashlib.sha256((tmp_path / name).read_bytes()).digest() for name in ("a", "b")]
    assert load(path).sha256 == hashlib.sha256(path.read_bytes() + b"".join(digests)).hexdigest()
    assert file_hash(path) == load(path).sha256


def test_a_relative_path_will_do(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model_path.parent)
    assert load("net.onnx").sha256 == load(model_path).sha256


def test_weights_that_are_replaced_later_do_not_change_what_was_loaded(model_path: Path) -> None:
    weights = model_path.with_name("weights.bin")
    before = weights.read_bytes()
    loaded = load(model_path)
    other = model_path.with_name("other.bin")
    other.write_bytes(bytes(len(before)))
    os.replace(other, weights)
    tensor = loaded.model.graph.initializers["w"].const_value
    assert tensor is not None
    assert tensor.tobytes() == before


@pytest.mark.parametrize("location", ["../secret.bin", "sub/../../secret.bin", "..\\secret.bin", "", "C:\\secret.bin"])
def test_a_path_that_leaves_the_folder(model_path: Path, location: str) -> None:
    (model_path.parent.parent / "secret.bin").write_bytes(bytes(SIZE * SIZE * 4))
    _spoil(model_path, location=location, offset="0")
    _refused(model_path, location, "inside the model's folder")


def test_an_absolute_path(model_path: Path) -> None:
    weights = model_path.with_name("weights.bin")
    _spoil(model_path, location=str(weights))
    _refused(model_path, str(weights), "inside the model's folder")


def test_a_link_out_of_the_folder(model_path: Path) -> None:
    weights = model_path.with_name("weights.bin")
    outside = model_path.parent.parent / "outside.bin"
    weights.rename(outside)
    weights.symlink_to(outside)
    _refused(model_path, "weights.bin", "leads out")


def test_a_link_within_the_folder_is_followed(model_path: Path) -> None:
    weights = model_path.with_name("weights.bin")
    weights.rename(model_path.with_name("real.bin"))
    weights.symlink_to("real.bin")
    assert load(model_path).bytes == model_path.stat().st_size + SIZE * SIZE * 4


def test_a_model_that_is_a_link_may_have_its_data_where_it_really_is(model_path: Path) -> None:
    store = model_path.parent.parent / "store"
    model_path.parent.rename(store)
    model_path.parent.mkdir()
    for name in ("net.onnx", "weights.bin"):
        model_path.with_name(name).symlink_to(store / name)
    assert load(model_path).bytes == model_path.stat().st_size + SIZE * SIZE * 4


def test_a_missing_file(model_path: Path) -> None:
    model_path.with_name("weights.bin").unlink()
    _refused(model_path, "weights.bin", "not there")


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ({"offset": str(SIZE)}, "of a file of"),
        ({"offset": str(2**62)}, "of a file of"),
        ({"offset": "-1"}, "offset '-1'"),
        ({"offset": "0x10"}, "offset '0x10'"),
        ({"length": "12"}, "length 12"),
        ({"length": str(2**40)}, f"length {2**40}"),
        ({"length": "9" * 400}, "expected a number of bytes"),
    ],
)
def test_a_place_that_is_not_in_the_file(model_path: Path, entries: dict[str, str], word: str) -> None:
    _spoil(model_path, **entries)
    _refused(model_path, "weights.bin", word)


def test_a_truncated_file(model_path: Path) -> None:
    weights = model_path.with_name("weights.bin")
    weights.write_bytes(weights.read_bytes()[:-1])
    _refused(model_path, "weights.bin")


def test_a_model_without_a_file_has_no_external_data(model_path: Path) -> None:
    model = onnx.load(model_path, load_external_data=False)
    with pytest.raises(ModelError, match="'w'.*weights.bin.*path"):
        load(model)
