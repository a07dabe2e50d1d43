"""A network that is computed piece by piece gives what it gives as a whole."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx_models import Net, random_feed, run_model
from walked_networks import captured, chain, read_late, residual, several_outputs

from quark.features.finetuning import device_walk
from quark.features.finetuning.walk import Walk, split
from quark.onnx.data.samples import SampleStore
from quark.onnx.graph import piece

Array = np.ndarray[Any, Any]
SAMPLES = 5


class Stores:
    """Makes stores that go to a file at once, and knows which of them are still open."""

    def __init__(self) -> None:
        self.made: list[SampleStore] = []
        self.closed: list[SampleStore] = []

    def __call__(self) -> SampleStore:
        store = SampleStore(memory_bytes=100)
        close = store.close

        def noted() -> None:
            self.closed.append(store)
            close()

        store.close = noted  # type: ignore[method-assign]
        self.made.append(store)
        return store

    @property
    def open(self) -> list[SampleStore]:
        return [store for store in self.made if store not in self.closed]


NETWORKS = {
    "chain": chain,
    "residual": residual,
    "read late": read_late,
    "captured": captured,
    "several outputs": several_outputs,
}
BY_ONNX_RUNTIME = {"captured"}  # networks that torch does not compute


def layers_of(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "Conv"]


@pytest.fixture(params=["one by one", "joined"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every property holds for walks that stay on a device, too; here that is the processor."""
    monkeypatch.setattr(device_walk, "TOGETHER", 2)
    if request.param == "joined":
        if getattr(request.node, "callspec", None) and request.node.callspec.params.get("name") in BY_ONNX_RUNTIME:
            pytest.skip("torch does not compute this network")
        on_cpu = functools.partial(device_walk.DeviceWalk, device="cpu")
        monkeypatch.setattr(sys.modules[__name__], "new_walk", on_cpu)
    return str(request.param)


@pytest.fixture
def one_by_one(kind: str) -> None:
    """For networks and samples that are never joined."""
    if kind == "joined":
        pytest.skip("such samples are computed one by one")


new_walk: Any = Walk


def walk_of(model: onnx.ModelProto, stores: Any = None, samples: int = SAMPLES) -> tuple[Walk, list[dict[str, Array]]]:
    feeds = [random_feed(model, seed) for seed in range(samples)]
    for number, feed in enumerate(feeds):
        if "flag" in feed:
            feed["flag"] = np.array(number % 2 == 0)
    return new_walk(ir.serde.deserialize_model(model), feeds, stores or Stores()), feeds


def whole(
    model: onnx.ModelProto, tensors: Sequence[str], feeds: Sequence[Mapping[str, Array]]
) -> list[dict[str, Array]]:
    """The tensors of one run of the network for each sample."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    computed = [name for name in tensors if name not in {each.name for each in model.graph.input}]
    copy.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in computed)
    return [{**feed, **run_model(copy, feed)} for feed in feeds]


def visited(walk: Walk, tensors: Sequence[str]) -> list[dict[str, Array]]:
    found: dict[int, dict[str, Array]] = {}

    def see(samples: range, values: Mapping[str, Any]) -> None:
        assert not set(samples) & set(found)
        found.update(split(samples, values))

    walk.visit(tensors, see)
    assert sorted(found) == list(range(len(found)))
    return [found[index] for index in range(len(found))]


def assert_same(found: list[dict[str, Array]], expected: list[dict[str, Array]], tensors: Sequence[str]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert set(one) == set(tensors)
        for name in tensors:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-4)


def cuts(count: int) -> list[tuple[int, ...]]:
    """Some of the ways to cut so many layers into pieces."""
    every = [combination for size in range(count) for combination in itertools.combinations(range(1, count), size)]
    return random.Random(0).sample(every, min(5, len(every)))


@pytest.mark.parametrize("name", NETWORKS)
def test_any_pieces_give_the_same_tensors(name: str) -> None:
    model = NETWORKS[name]()
    layers = layers_of(model)
    tensors = list(dict.fromkeys(value for layer in layers for value in (layer.input[0], layer.output[0])))
    stores = Stores()
    _, feeds = walk_of(model)
    expected = whole(model, tensors, feeds)
    for cut in cuts(len(layers)):
        walk, _ = walk_of(model, stores)
        ends = [*cut, len(layers)]
        for start, end in zip([0, *cut], ends, strict=True):
            stage = layers[start:end]
            wanted = list(dict.fromkeys(value for layer in stage for value in (layer.input[0], layer.output[0])))
            assert_same(visited(walk, wanted), expected, wanted)
            if end < len(layers):
                walk.advance([layer.name for layer in layers[:end]], [layer.name for layer in layers[end:]])
                assert len(stores.open) <= 1
        walk.close()
        assert not stores.open


@pytest.mark.parametrize("name", NETWORKS)
def test_tensors_on_the_way_are_those_of_a_visit(name: str) -> None:
    """A walk that goes on hands out tensors of the part that it leaves behind."""
    model = NETWORKS[name]()
    layers = layers_of(model)
    walk, feeds = walk_of(model)
    tensors = list(dict.fromkeys(value for layer in layers for value in (layer.input[0], layer.output[0])))
    expected = whole(model, tensors, feeds)
    names = [layer.name for layer in layers]
    for end in range(1, len(layers)):
        found: dict[int, dict[str, Array]] = {}
        wanted = [layers[end - 1].output[0]]

        def see(samples: range, values: Mapping[str, Any], found: Any = found, wanted: Any = wanted) -> None:
            found.update(split(samples, {name: values[name] for name in wanted}))

        walk.advance(names[:end], names[end:], wanted, see)
        assert_same([found[index] for index in range(len(feeds))], expected, wanted)
    rest = [layers[-1].output[0]]
    assert_same(visited(walk, rest), expected, rest)
    walk.close()


def test_a_walk_sees_weights_that_changed_meanwhile() -> None:
    """What is behind a layer that was trained is computed with its new weights."""
    model = chain()
    layers = layers_of(model)
    walk, feeds = walk_of(model)
    doubled = onnx.ModelProto()
    doubled.CopyFrom(model)
    bias = next(each for each in doubled.graph.initializer if each.name == layers[0].input[2])
    values = onnx.numpy_helper.to_array(bias) + 1
    bias.CopyFrom(onnx.numpy_helper.from_array(values, bias.name))
    visited(walk, [layers[0].output[0]])
    changed = walk.value(layers[0].output[0])
    assert changed is not None
    producer = changed.producer()
    assert producer is not None
    assert producer.inputs[2] is not None
    producer.inputs[2].const_value = ir.Tensor(values, name=bias.name)
    walk.advance([layers[0].name], [layer.name for layer in layers[1:]])
    wanted = [layers[3].output[0]]
    assert_same(visited(walk, wanted), whole(doubled, wanted, feeds), wanted)
    walk.close()


def test_no_more_is_remembered_of_a_chain_than_one_tensor() -> None:
    model = chain()
    layers = layers_of(model)
    walk, _ = walk_of(model)
    for end in range(1, len(layers)):
        done, rest = [layer.name for layer in layers[:end]], [layer.name for layer in layers[end:]]
        assert walk.live(done, rest) == [layers[end - 1].output[0]]
        walk.advance(done, rest)
        assert walk.live(done, rest) == [layers[end - 1].output[0]]
    walk.close()


def test_what_is_read_late_is_remembered_until_then() -> None:
    model = read_late()
    layers = layers_of(model)
    early, *middle, masked, last = layers
    walk, _ = walk_of(model)
    names = [layer.name for layer in layers]
    assert set(walk.live(names[:1], names[1:])) == {early.output[0], "mask"}
    assert set(walk.live(names[:3], names[3:])) == {middle[1].output[0], early.output[0], "mask"}
    assert set(walk.live(names[:5], names[5:])) == {masked.output[0], early.output[0]}
    assert walk.live(names, []) == []
    assert last.name in names


def test_what_branches_capture_is_remembered(one_by_one: None) -> None:
    model = captured()
    names = [layer.name for layer in layers_of(model)]
    walk, _ = walk_of(model)
    late = next(node for node in model.graph.node if node.name == names[2])
    assert set(walk.live(names[:3], names[3:])) == {"x", "flag", layers_of(model)[0].output[0], late.output[0]}


def test_nothing_is_computed_again_where_nothing_changes(kind: str) -> None:
    model = chain()
    stores = Stores()
    walk, _ = walk_of(model, stores)
    names = [layer.name for layer in layers_of(model)]
    walk.advance([], names)
    assert not stores.made
    walk.advance(names[:2], names[2:])
    remembered = walk._samples
    walk.advance(names[:2], names[2:])
    assert walk._samples is remembered
    assert len(stores.made) == (kind == "one by one")
    walk.close()


def test_the_order_of_the_samples_is_kept(one_by_one: None) -> None:
    """Of many samples, some of which take longer."""
    net = Net()
    x = net.input("x", (1, "n"))
    y = net.node("Identity", net.node("Mul", x, net.constant(2.0), name="twice"), name="end")
    model = net.model(y)
    feeds = [{"x": np.full((1, 200_000 if i % 7 == 0 else 2), i, np.float32)} for i in range(40)]
    walk = new_walk(ir.serde.deserialize_model(model), feeds, Stores(), workers=4)
    walk.advance(["twice"], ["end"])
    found = visited(walk, [y])
    assert [float(each[y][0, 0]) for each in found] == [2.0 * i for i in range(40)]
    walk.close()


def test_a_failure_leaves_no_store_behind(one_by_one: None) -> None:
    model = chain()
    stores = Stores()
    walk, feeds = walk_of(model, stores)
    feeds[2]["x"] = np.zeros((1, 7, 6, 6), np.float32)  # three channels are expected
    names = [layer.name for layer in layers_of(model)]
    with pytest.raises(Exception, match="nvalid|must match exactly"):
        walk.advance(names[:1], names[1:])
    assert not stores.open


def mixing(operator: str) -> onnx.ModelProto:
    """A network in which samples of a batch see each other, or that takes one sample only."""
    net = Net()
    x = net.input("x", ("n", 3, 4, 4))
    if operator == "mean":
        x = net.node("Sub", x, net.node("ReduceMean", x, axes=[0], keepdims=1))
    else:
        x = net.node("Reshape", x, net.constant(np.array([1, 3, -1, 4]), "shape"))
    return net.model(net.conv(net.conv(x, (3, 3), 1), (3, 3), 1))


def reason_against(model: onnx.ModelProto, feeds: Sequence[Mapping[str, Array]]) -> str | None:
    return device_walk.why_not(ir.serde.deserialize_model(model), {}, feeds, "cpu")


@pytest.mark.parametrize("name", sorted(set(NETWORKS) - BY_ONNX_RUNTIME))
def test_independent_samples_can_be_joined(name: str) -> None:
    model = NETWORKS[name]()
    assert reason_against(model, walk_of(model)[1]) is None


@pytest.mark.parametrize("operator", ["mean", "reshape"])
def test_samples_that_see_each_other_cannot_be_joined(operator: str) -> None:
    feeds = [{"x": np.random.default_rng(seed).standard_normal((1, 3, 4, 4), np.float32)} for seed in range(4)]
    assert "does not have the samples along its first axis" in str(reason_against(mixing(operator), feeds))


def test_samples_of_several_shapes_and_unknown_operators_cannot_be_joined() -> None:
    feeds = [{"x": np.ones((1, 3, size, size), np.float32)} for size in (6, 7)]
    assert reason_against(chain(), feeds) == "they differ in shape"
    images = [{"x": np.ones((1, 2, 4, 4), np.float32)}] * 2
    assert "torch is not taught here: If" in str(reason_against(captured(), images))


def test_an_input_with_a_default_need_not_be_fed() -> None:
    net = Net()
    x = net.input("x", (1, 3, 4, 4))
    shift = net.constant(np.ones((1, 3, 4, 4), np.float32), "shift")
    net.input("shift", (1, 3, 4, 4))
    y = net.conv(x, (3, 3), 1)
    z = net.conv(net.node("Add", y, shift), (3, 3), 1)
    model = net.model(z)
    feeds = [{"x": random_feed(model, seed)["x"]} for seed in range(3)]
    walk = new_walk(ir.serde.deserialize_model(model), feeds, Stores())
    first, last = layers_of(model)
    walk.advance([first.name], [last.name])
    expected = [run_model(model, feed) for feed in feeds]
    assert_same(visited(walk, [z]), expected, [z])
    walk.close()


def test_a_piece_is_no_more_than_it_has_to_be_and_the_model_stays() -> None:
    model = ir.serde.deserialize_model(residual())
    before = ir.serde.serialize_model(model).SerializeToString()
    nodes = list(model.graph)
    given, wanted = str(nodes[3].outputs[0].name), str(nodes[5].outputs[0].name)
    part = piece(model, [given], [wanted])
    assert [value.name for value in part.graph.inputs] == [given]
    assert [value.name for value in part.graph.outputs] == [wanted]
    assert len(list(part.graph)) == 2
    assert ir.serde.serialize_model(model).SerializeToString() == before
