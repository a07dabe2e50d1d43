"""Packed files: the same numbers in the runtime, and the same bytes when unpacked."""

import numpy as np
import onnx
import pytest
from packed_models import SHAPES, initializers, marked_model, outputs_of

from quark.formats.catalog import BLOCK_FORMATS
from quark.onnx.file_graph import read_message
from quark.onnx.pack import pack_message, pack_model, unpack_message, unpack_model

PROFILES = ("portable", "custom")


@pytest.fixture
def source(tmp_path):
    def save(*arguments, **options):
        path = tmp_path / "model.onnx"
        onnx.save(marked_model(*arguments, **options), path)
        return path

    return save


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
def test_every_format_runs_and_comes_back(source, tmp_path, fmt, profile):
    path, packed, back = source(fmt), tmp_path / "packed.onnx", tmp_path / "back.onnx"
    facts = pack_model(path, packed, profile)
    assert len(facts.packed) == len(SHAPES), facts.left
    onnx.checker.check_model(str(packed), full_check=True)
    before, after = outputs_of(path), outputs_of(packed)
    for name, value in before.items():
        assert after[name].tobytes() == value.tobytes(), name
    unpack_model(packed, back)
    assert back.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("dtype", [np.float16])
def test_float16_weights(source, tmp_path, dtype, profile):
    path, packed, back = source("mxfp6_e3m2", dtype=dtype), tmp_path / "packed.onnx", tmp_path / "back.onnx"
    pack_model(path, packed, profile)
    before, after = outputs_of(path), outputs_of(packed)
    assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())
    unpack_model(packed, back)
    assert initializers(back) == initializers(path)


@pytest.mark.parametrize("opset", [13, 19, 21])
@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp8_e5m2"])
def test_opsets_stay_and_have_their_own_layouts(source, tmp_path, fmt, opset):
    path, packed = source(fmt, opset=opset), tmp_path / "packed.onnx"
    pack_model(path, packed)
    assert onnx.load(packed).opset_import == onnx.load(path).opset_import
    before, after = outputs_of(path), outputs_of(packed)
    assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())
    unpack_model(packed, tmp_path / "back.onnx")
    assert initializers(tmp_path / "back.onnx") == initializers(path)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("fmt", ["mxfp4_e2m1", "mxfp6_e2m3", "mxfp8_e4m3", "mxint8", "mx6", "mx9"])
def test_unpacking_folds_away_with_default_options(source, tmp_path, fmt, profile):
    pack_model(source(fmt), tmp_path / "packed.onnx", profile)
    outputs_of(tmp_path / "packed.onnx", optimized=tmp_path / "optimized.onnx")
    assert {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node} <= {"Add", "Cast"}


@pytest.mark.parametrize(
    ("fmt", "bits"),
    [("mxfp4_e2m1", 4.25), ("mxfp6_e2m3", 6.25), ("mxfp6_e3m2", 6.25), ("mxfp8_e4m3", 8.25), ("mxint8", 8.25)]
    + [("mx4", 4), ("mx6", 6), ("mx9", 9), ("bfp16", 9), ("bfp16c", 9)],
)
def test_the_width_is_that_of_the_format(source, tmp_path, fmt, bits):
    facts = pack_model(source(fmt), tmp_path / "packed.onnx")
    whole = {weight.name: weight.bits for weight in facts.packed if weight.name in ("w0", "w3")}
    assert whole == {"w0": bits, "w3": bits}


def test_the_same_bytes_every_time(source, tmp_path):
    path = source("mx6")
    for profile in PROFILES:
        first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
        pack_model(path, first, profile)
        pack_model(path, second, profile)
        assert first.read_bytes() == second.read_bytes()


def test_in_memory_the_message_stays_as_it_was(source):
    message, _, _ = read_message(source("mxfp4_e2m1"))
    before = message.proto.SerializeToString()
    packed, facts = pack_message(message)
    assert message.proto.SerializeToString() == before
    assert packed.weight_bytes < message.weight_bytes / 6
    assert facts.bytes_after < facts.bytes_before / 4
    back, _ = unpack_message(packed)
    assert back.proto.SerializeToString(deterministic=True) == message.proto.SerializeToString(deterministic=True)
    assert all(back.weights[name].tobytes() == weight.tobytes() for name, weight in message.weights.items())


def test_external_data(tmp_path, source):
    path = tmp_path / "external.onnx"
    onnx.save(onnx.load(source("mxfp4_e2m1")), path, save_as_external_data=True, location="w.data", size_threshold=0)
    pack_model(path, tmp_path / "packed.onnx")
    assert not list(tmp_path.glob("packed*.data"))
    unpack_model(tmp_path / "packed.onnx", tmp_path / "back.onnx")
    assert initializers(tmp_path / "back.onnx") == initializers(path)
