"""Files that were not made for packing: quantizers on float weights, shared weights, subgraphs, what is left."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from packed_models import initializers, mark, marked_model, model_of, outputs_of, rounded

from quark.errors import ModelError, UnknownNameError
from quark.onnx import get_library_path
from quark.onnx.file_graph import read_message
from quark.onnx.pack import pack_message, pack_model, unpack_model
from quark.onnx.pack.editing import KEY
from quark.ops.schema import DOMAIN

RANDOM = np.random.default_rng(3)


def float_weight(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def save(model, path):
    onnx.save(model, path)
    return path


def assert_same_outputs(first, second):
    before, after = (outputs_of(path, get_library_path()) for path in (first, second))
    assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())


@pytest.mark.parametrize("fmt", ["mxfp4_e2m1", "mx9", "bfp16"])
def test_a_block_quantizer_on_a_float_weight_becomes_a_packed_weight(tmp_path, fmt):
    weights = {"w": (float_weight(32, 64, 3, 3), mark("w", fmt, 1, "q", domain=DOMAIN))}
    model = model_of(weights)
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    source = save(model, tmp_path / "peer.onnx")
    facts = pack_model(source, tmp_path / "packed.onnx")
    assert [weight.format for weight in facts.packed] == [fmt]
    assert "rounded first" in facts.packed[0].note
    assert all(node.domain != DOMAIN for node in onnx.load(tmp_path / "packed.onnx").graph.node)
    assert_same_outputs(source, tmp_path / "packed.onnx")
    unpack_model(tmp_path / "packed.onnx", tmp_path / "back.onnx")
    assert_same_outputs(source, tmp_path / "back.onnx")


def test_a_float_weight_that_something_else_reads_stays(tmp_path):
    weights = {
        "w": (float_weight(32, 64), mark("w", "mxfp4_e2m1", 1, "q", domain=DOMAIN)),
        "v": (rounded((32, 64), 1, "mxfp4_e2m1"), mark("v", "mxfp4_e2m1", 1, "p")),
    }
    extra = helper.make_node("Neg", ["w"], ["z"], name="other")
    model = model_of(weights, [extra], outputs=[helper.make_tensor_value_info("z", TensorProto.FLOAT, [32, 64])])
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    facts = pack_model(save(model, tmp_path / "m.onnx"), tmp_path / "packed.onnx")
    assert [weight.name for weight in facts.packed] == ["v"]
    assert {each.name: each.reason for each in facts.left} == {"w": "Neg 'other' reads it in float as well"}


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16])
def test_quantize_linear_of_a_weight_becomes_its_codes(tmp_path, kind):
    opset = 21 if kind == np.int16 else 17
    weight = float_weight(32, 64)
    scale = np.full(32, 0.02, np.float32)
    quantize = helper.make_node("QuantizeLinear", ["w", "s", "z"], ["codes"], axis=0)
    nodes = [
        quantize,
        helper.make_node("DequantizeLinear", ["codes", "s", "z"], ["d"], axis=0),
        helper.make_node("Add", ["d", "x"], ["y"]),
    ]
    constants = {"w": weight, "s": scale, "z": np.full(32, 5, kind)}
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [32, 64])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    source = save(model, tmp_path / "pairs.onnx")
    facts = pack_model(source, tmp_path / "packed.onnx")
    assert [(weight.name, weight.format) for weight in facts.packed] == [("codes", np.dtype(kind).name)]
    assert "QuantizeLinear" not in {node.op_type for node in onnx.load(tmp_path / "packed.onnx").graph.node}
    assert_same_outputs(source, tmp_path / "packed.onnx")


def test_a_weight_that_several_nodes_and_a_subgraph_read(tmp_path):
    weight = rounded((32, 64), 1, "mx6")
    out = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    branch = [helper.make_graph([helper.make_node(op, ["w"], ["inner"])], op, [], [out]) for op in ("Neg", "Abs")]
    nodes = [
        helper.make_node("Cast", ["x"], ["flag"], to=TensorProto.BOOL),
        helper.make_node("If", ["flag"], ["z"], then_branch=branch[0], else_branch=branch[1]),
        helper.make_node("Neg", ["w"], ["n"]),
    ]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [32, 64]) for name in ("z", "n")]
    model = model_of({"w": (weight, mark("w", "mx6", 1, "q"))}, nodes, outputs=infos)
    source = save(model, tmp_path / "shared.onnx")
    for profile in ("portable", "custom"):
        packed = tmp_path / f"{profile}.onnx"
        pack_model(source, packed, profile)
        assert_same_outputs(source, packed)
        unpack_model(packed, tmp_path / "back.onnx")
        assert (tmp_path / "back.onnx").read_bytes() == source.read_bytes()


def test_what_is_left_and_why(tmp_path):
    weights = {
        "good": (rounded((32, 64), 1, "mxint8"), mark("good", "mxint8", 1, "a")),
        "changed": (float_weight(32, 64), mark("changed", "mxint8", 1, "b")),
        "small": (rounded((4, 64), 1, "mxint8"), mark("small", "mxint8", 1, "c")),
        "given": (rounded((32, 64), 1, "mxint8"), mark("given", "mxint8", 1, "d")),
    }
    given = helper.make_tensor_value_info("given", TensorProto.FLOAT, [32, 64])
    facts = pack_model(save(model_of(weights, inputs=[given]), tmp_path / "m.onnx"), tmp_path / "packed.onnx")
    assert [weight.name for weight in facts.packed] == ["good"]
    reasons = {each.name: each.reason for each in facts.left}
    assert "not all of its numbers are in 'mxint8'" in reasons["changed"]
    assert "1024 bytes" in reasons["small"]
    assert "input of the graph" in reasons["given"]


def test_nothing_to_pack_is_an_error_that_says_why(tmp_path):
    weights = {"w": (float_weight(32, 64), helper.make_node("Identity", ["w"], ["i"]))}
    with pytest.raises(ModelError, match="no weight is in a block format"):
        pack_model(save(model_of(weights), tmp_path / "m.onnx"), tmp_path / "packed.onnx")
    assert not (tmp_path / "packed.onnx").exists()
    message, _, _ = read_message(tmp_path / "m.onnx")
    same, facts = pack_message(message)
    assert same is message
    assert not facts.packed
    assert "no weight is in a block format" in facts.remarks[0]


def test_packed_twice_unpacked_twice_or_onto_itself(tmp_path):
    source = save(marked_model("mxfp4_e2m1"), tmp_path / "m.onnx")
    packed = tmp_path / "packed.onnx"
    pack_model(source, packed)
    with pytest.raises(ModelError, match="packed already"):
        pack_model(packed, tmp_path / "again.onnx")
    with pytest.raises(ModelError, match="is not packed"):
        unpack_model(source, tmp_path / "again.onnx")
    for run in (pack_model, unpack_model):
        with pytest.raises(ValueError, match="is the input model"):
            run(packed, packed)
    with pytest.raises(UnknownNameError, match="Did you mean portable"):
        pack_model(source, tmp_path / "again.onnx", "portabel")


DAMAGES = {
    "shape": lambda weight: weight.update(shape=[1 << 40, 64]),
    "negative": lambda weight: weight.update(shape=[-1, 64]),
    "plane": lambda weight: weight["planes"].update(codes="nothing"),
    "format": lambda weight: weight["attributes"].update(element_dtype="fp3"),
    "layout": lambda weight: weight.update(layout="magic"),
    "type": lambda weight: weight.update(dtype=7),
    "missing": lambda weight: weight.pop("planes"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_an_error_and_no_file(tmp_path, damage):
    packed = tmp_path / "packed.onnx"
    pack_model(save(marked_model("mxfp4_e2m1"), tmp_path / "m.onnx"), packed)
    model = onnx.load(packed)
    entry = next(prop for prop in model.metadata_props if prop.key == KEY)
    content = json.loads(entry.value)
    DAMAGES[damage](content["weights"][0])
    entry.value = json.dumps(content)
    onnx.save(model, packed)
    with pytest.raises(ModelError):
        unpack_model(packed, tmp_path / "back.onnx")
    assert not (tmp_path / "back.onnx").exists()


def test_notes_on_a_weight_survive(tmp_path):
    model = marked_model("mxfp4_e2m1")
    model.graph.initializer[1].doc_string = "from the teacher"
    source = save(model, tmp_path / "m.onnx")
    pack_model(source, tmp_path / "packed.onnx")
    unpack_model(tmp_path / "packed.onnx", tmp_path / "back.onnx")
    assert onnx.load(tmp_path / "back.onnx").graph.initializer[1].doc_string == "from the teacher"
    assert initializers(tmp_path / "back.onnx") == initializers(source)
