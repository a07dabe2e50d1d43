"""Whatever a person has becomes samples; whatever is wrong with it is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from quark.errors import InvalidValueError, OutputError, UnsupportedTypeError
from quark.onnx.data import (
    CachedDataReader,
    InputInfo,
    PathDataReader,
    RandomDataReader,
    input_infos,
    open_samples,
)
from quark.onnx.data.samples import SampleStore
from quark.onnx.data.sources import concrete_shape

FLOAT = np.dtype(np.float32)
IMAGE = (InputInfo("x", FLOAT, (None, 3, 4, 4)),)
FIXED = (InputInfo("x", FLOAT, (2, 5)),)
TWO = (InputInfo("ids", np.dtype(np.int64), ("batch", 7)), InputInfo("mask", np.dtype(bool), ("batch", 7)))


def images(count: int) -> Any:
    return np.arange(count * 48, dtype=np.float32).reshape(count, 3, 4, 4)


class Reader:
    """ONNX Runtime's protocol."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items
        self._left = iter(items)

    def get_next(self) -> Any:
        return next(self._left, None)


class RewindingReader(Reader):
    def rewind(self) -> None:
        self._left = iter(self._items)


def rows(data: Any, inputs: Any = IMAGE, **options: Any) -> list[float]:
    """The first number of every sample, those held out included, in order."""
    samples = open_samples(data, inputs, **options)
    return sorted(float(sample["x"].flat[0]) for sample in [*samples, *samples.held_out])


EXPECTED = [48.0 * i for i in range(10)]


def as_data(kind: str) -> Any:
    x = images(10)
    batches = [row[None] for row in x]
    forms: dict[str, Any] = {
        "array": x,
        "samples of batches": x[:, None],
        "dicts": [{"x": batch} for batch in batches],
        "arrays": batches,
        "rows without a batch axis": list(x),
        "tuples with labels": [(batch, 3) for batch in batches],
        "lists with labels": [[batch, np.int64(3)] for batch in batches],
        "nested numbers": [batch.tolist() for batch in batches],
        "a generator": (batch for batch in batches),
        "a reader": Reader([{"x": batch} for batch in batches]),
        "a rewinding reader": RewindingReader([{"x": batch} for batch in batches]),
    }
    return forms[kind]


KINDS = (
    *("array", "samples of batches", "dicts", "arrays", "rows without a batch axis", "tuples with labels"),
    *("lists with labels", "nested numbers", "a generator", "a reader", "a rewinding reader"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_gives_the_same_samples(kind: str) -> None:
    assert rows(as_data(kind)) == EXPECTED


@pytest.mark.parametrize("kind", KINDS)
def test_samples_can_be_read_again(kind: str) -> None:
    samples = open_samples(as_data(kind), IMAGE)
    first = [sample["x"].copy() for sample in samples]
    np.testing.assert_array_equal(first, [sample["x"] for sample in samples])
    assert samples.count == len(samples) == len(first) == 9
    assert len(samples.held_out) == 1
    assert not samples.is_random
    assert not samples.is_held_out_shared


def test_torch_tensors_and_loaders_are_taken() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(images(10)), torch.zeros(10))
    assert rows(torch.utils.data.DataLoader(data, batch_size=1)) == EXPECTED
    assert rows(torch.from_numpy(images(10)).requires_grad_()) == EXPECTED
    assert rows(data) == EXPECTED


def test_files_of_numpy_are_taken(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", images(10))
    np.savez(tmp_path / "named.npz", x=images(10))
    np.savez(tmp_path / "lone.npz", anything=images(10))
    for name in ("a.npy", "named.npz", "lone.npz"):
        assert rows(tmp_path / name) == EXPECTED
        assert rows(str(tmp_path / name)) == EXPECTED
    folder = tmp_path / "folder"
    folder.mkdir()
    for i, row in enumerate(images(10)):
        np.save(folder / f"{i}.npy", row[None])
    assert rows(folder) == EXPECTED


def test_several_inputs_by_name(tmp_path: Path) -> None:
    ids, mask = np.arange(21).reshape(3, 7), np.ones((3, 7), bool)
    np.savez(tmp_path / "both.npz", ids=ids, mask=mask)
    for data in (tmp_path / "both.npz", [{"ids": a[None], "mask": b[None]} for a, b in zip(ids, mask, strict=True)]):
        samples = open_samples(data, TWO)
        assert samples.count == 2
        assert next(iter(samples))["ids"].shape == (1, 7)
    np.savez(tmp_path / "uneven.npz", ids=ids, mask=mask[:2])
    with pytest.raises(InvalidValueError, match="different numbers of samples"):
        open_samples(tmp_path / "uneven.npz", TWO)
    with pytest.raises(UnsupportedTypeError, match="2 inputs"):
        open_samples([ids], TWO)


def test_batches() -> None:
    samples = open_samples(images(10), IMAGE, batch_size=4)
    assert [len(sample["x"]) for sample in samples] == [4, 4]
    assert len(samples.held_out[0]["x"]) == 2
    fixed = open_samples(np.ones((8, 5), np.float32), FIXED)
    assert [each["x"].shape for each in fixed] == [(2, 5)] * 3
    several = open_samples([np.ones((6, 5), np.float32)], FIXED)
    assert next(iter(several))["x"].shape == (6, 5)
    with pytest.raises(InvalidValueError, match=r"shape \(3, 5\)"):
        open_samples([np.ones((3, 5), np.float32)], FIXED)


@pytest.mark.parametrize(("count", "held"), [(1, 1), (2, 1), (7, 1), (8, 1), (16, 2), (40, 5), (200, 16)])
def test_about_every_eighth_is_held_out(count: int, held: int) -> None:
    samples = open_samples(images(count), IMAGE)
    assert len(samples.held_out) == held
    assert samples.is_held_out_shared == (count == 1)
    assert samples.count == (count if count == 1 else count - held)
    used = {float(sample["x"].flat[0]) for sample in samples}
    kept = {float(each["x"].flat[0]) for each in samples.held_out}
    assert not (used & kept) or count == 1


def test_a_limit_takes_the_first_and_holds_out_of_the_rest() -> None:
    samples = open_samples(images(40), IMAGE, count=16)
    assert [float(sample["x"].flat[0]) / 48 for sample in samples] == list(range(16))
    assert [float(each["x"].flat[0]) / 48 for each in samples.held_out] == [16, 17]
    assert open_samples(images(16), IMAGE, count=16).count == 14


def batched(data: Any, size: int) -> dict[str, Any]:
    """Batches of that size in every form that has them."""
    batches = [data[i : i + size] for i in range(0, len(data), size)]
    forms = {"list": batches, "reader": Reader([{"x": batch} for batch in batches]), "array": data}
    return forms | {"labelled": [(batch, np.zeros(len(batch))) for batch in batches]}


@pytest.mark.parametrize("form", ["list", "reader", "array", "labelled"])
def test_a_limit_counts_the_samples_in_batches(form: str) -> None:
    samples = open_samples(batched(images(64), 12)[form], IMAGE, count=32, batch_size=12)
    assert [len(sample["x"]) for sample in samples] == [12, 12, 8]
    assert [float(sample["x"].flat[0]) / 48 for sample in samples] == [0, 12, 24]
    assert samples.rows == 32
    assert samples.held_out_rows == 4
    assert float(samples.held_out[0]["x"].flat[0]) / 48 == 32  # what is left of a batch that was cut


def test_a_limit_counts_the_samples_of_a_torch_loader() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(images(100)), torch.zeros(100))
    samples = open_samples(torch.utils.data.DataLoader(data, batch_size=16), IMAGE, count=40)
    assert (samples.count, samples.rows, samples.held_out_rows) == (3, 40, 5)


def test_batches_of_a_fixed_size_stay_whole() -> None:
    samples = open_samples(np.ones((20, 5), np.float32), FIXED, count=5)
    assert [len(sample["x"]) for sample in samples] == [2, 2, 2]
    assert samples.held_out_rows == 2
    assert open_samples(None, FIXED, count=6).rows == 6


def test_inputs_without_a_common_first_axis_are_one_sample() -> None:
    two = (InputInfo("x", FLOAT, (None, 5)), InputInfo("table", FLOAT, (None, 5)))
    items = [{"x": np.ones((3, 5), np.float32), "table": np.ones((7, 5), np.float32)}] * 6
    assert [len(sample["x"]) for sample in open_samples(items, two, count=4)] == [3] * 4


@pytest.mark.parametrize(("size", "limit", "expected"), [(1, 5, 5), (4, 5, 2), (4, 8, 2), (16, 1, 1), (1, 99, 99)])
def test_how_many_batches_hold_so_many_samples(size: int, limit: int, expected: int) -> None:
    assert open_samples(images(64), IMAGE, batch_size=size).batches(limit) == expected


def test_nothing_is_read_beyond_the_limit() -> None:
    taken = []

    def endless() -> Iterator[Any]:
        while True:
            taken.append(1)
            yield images(1)

    assert open_samples(endless(), IMAGE, count=8).count == 8
    assert len(taken) == 9


def test_a_used_reader_is_rewound_and_left_rewound() -> None:
    reader = RewindingReader([{"x": images(1)}, {"x": images(1)}])
    while reader.get_next() is not None:
        pass
    assert open_samples(reader, IMAGE).count == 1
    assert reader.get_next() is not None


def test_a_reader_that_reuses_its_buffer_is_copied() -> None:
    buffer = np.zeros((1, 3, 4, 4), np.float32)

    def reused() -> Iterator[Any]:
        for i in range(4):
            buffer[:] = i
            yield buffer

    assert rows(reused()) == [0.0, 1.0, 2.0, 3.0]


# ---- random data ----
def test_no_data_are_random_and_said_to_be() -> None:
    samples = open_samples(None, TWO, seed=3)
    assert samples.is_random
    assert "random" in samples.source
    assert samples.count == 8
    assert len(samples.held_out) == 1
    again = open_samples(None, TWO, seed=3)
    for a, b in zip(samples, again, strict=True):
        np.testing.assert_array_equal(a["ids"], b["ids"])
        assert a["ids"].min() >= 0
        assert a["mask"].dtype == bool
    assert open_samples(None, IMAGE, count=5).count == 5


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (("N", 3, "H", "W"), (1, 3, 224, 224)),
        ((None, None, None, 3), (1, 224, 224, 3)),
        ((4, 3, 32, 32), (4, 3, 32, 32)),
        (("batch", "length"), (1, 16)),
        ((), ()),
        (None, ()),
    ],
)
def test_free_dimensions_get_a_size(shape: Any, expected: tuple[int, ...]) -> None:
    assert concrete_shape(InputInfo("x", FLOAT, shape)) == expected


# ---- what is wrong ----
@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ([], InvalidValueError, ["no samples"]),
        (Reader([]), InvalidValueError, ["no samples", "Reader"]),
        ([{"y": images(1)}], InvalidValueError, ["sample 0", "'y'", "'x'", "float32"]),
        ([{"x": images(1), "y": 1}], InvalidValueError, ["'y'"]),
        ([images(1), images(1).astype(np.float64)], UnsupportedTypeError, ["sample 1", "float64", "float32", "astype"]),
        ([images(1).astype(np.uint8)], UnsupportedTypeError, ["uint8"]),
        ([images(1)[0, 0]], InvalidValueError, ["(4, 4)"]),
        ([np.ones((1, 3, 4, 5), np.float32)], InvalidValueError, ["(1, 3, 4, 5)", "3x4x4"]),
        ([images(1), images(1) * np.float32(np.nan)], InvalidValueError, ["sample 1", "'x'", "48 of 48", "NaN"]),
        ([np.full((1, 3, 4, 4), np.inf, np.float32)], InvalidValueError, ["Inf"]),
        ([np.ones((0, 3, 4, 4), np.float32)], InvalidValueError, ["(0, 3, 4, 4) holds no value", "leave the"]),
        ([["a", "b"]], UnsupportedTypeError, ["sample 0", "str"]),
        (["picture.jpg"], UnsupportedTypeError, ["str"]),
        (3, UnsupportedTypeError, ["int", "get_next"]),
        ("no/such/folder", InvalidValueError, ["no/such/folder", "no such"]),
    ],
)
def test_bad_data_are_refused_by_name(data: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        open_samples(data, IMAGE)
    for word in words:
        assert word in str(caught.value)


def test_an_input_of_size_0_is_said_to_be_the_reason() -> None:
    with pytest.raises(InvalidValueError, match=r"takes 'x' \(float32, 0x3x4x4\)\. No array with values fits"):
        open_samples(images(1), (InputInfo("x", FLOAT, (0, 3, 4, 4)),))


def test_a_reader_that_fails_is_named_with_the_sample_and_the_reason() -> None:
    def failing() -> Iterator[Any]:
        yield images(1)
        raise OSError("disk gone")

    with pytest.raises(InvalidValueError, match="sample 1 failed: OSError: disk gone") as caught:
        open_samples(failing(), IMAGE)
    assert isinstance(caught.value.__cause__, OSError)


def test_pickles_and_broken_files_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "broken.npz").write_bytes(b"PK nonsense")
    (tmp_path / "data.csv").write_text("1,2")
    (tmp_path / "text.npz").write_text("1,2")
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "names.npz", a=images(1), b=images(1))
    for name, word in (
        ("objects.npy", "objects.npy"),
        ("broken.npz", "broken.npz"),
        ("data.csv", r"\.npz"),
        ("text.npz", "does not begin as a .npy or .npz file"),
        ("empty", "no images"),
        ("names.npz", "'x'"),
    ):
        with pytest.raises(InvalidValueError, match=word):
            open_samples(tmp_path / name, IMAGE)


def test_a_model_without_inputs_and_impossible_counts_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="no inputs"):
        open_samples(None, ())
    with pytest.raises(InvalidValueError, match="count 0"):
        open_samples(images(3), IMAGE, count=0)


# ---- the store ----
def test_samples_beyond_the_memory_come_back_from_a_file() -> None:
    store = SampleStore(memory_bytes=500)
    for i in range(6):
        store.append({"x": np.full((2, 20), i, np.float32), "flag": np.array(True), "n": np.array([i], np.int64)})
    assert len(store) == 6
    for i in (5, 0, 3):
        sample = store[i]
        assert (sample["x"] == i).all()
        assert sample["x"].shape == (2, 20)
        assert sample["flag"].shape == ()
        assert sample["n"].dtype == np.int64
    store.close()


# ---- readers under the names that scripts use ----
def tiny_model() -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 4, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3, 4, 4])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "tiny", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_input_infos_skip_initializers() -> None:
    import onnx_ir as ir

    model = tiny_model()
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [1]))
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0]))
    assert input_infos(ir.from_proto(model)) == (InputInfo("x", FLOAT, ("N", 3, 4, 4)),)


def test_random_data_reader(tmp_path: Path) -> None:
    onnx.save(tiny_model(), tmp_path / "m.onnx")
    for model in (tiny_model(), tmp_path / "m.onnx", str(tmp_path / "m.onnx")):
        reader = RandomDataReader(model, input_shape=[2, 3, 4, 4], input_data_range={"x": [0, 5]})
        first = reader.get_next()
        assert first is not None
        assert first["x"].shape == (2, 3, 4, 4)
        assert 0 <= first["x"].min() <= first["x"].max() <= 5
        while reader.get_next() is not None:
            pass
        reader.rewind()
        np.testing.assert_array_equal(reader.get_next()["x"], first["x"])  # type: ignore[index]
    assert RandomDataReader(tiny_model(), {"x": (1, 3, 4, 4)}).get_next()["x"].shape == (1, 3, 4, 4)  # type: ignore[index]


def test_random_data_reader_has_the_numbers_of_amd_quark() -> None:
    infos = [("image", TensorProto.FLOAT, ["N", 3, "H", "W"]), ("ids", TensorProto.INT64, ["N", "S"])]
    inputs = [helper.make_tensor_value_info(*info) for info in infos]
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name, _, _ in infos]
    outputs = [helper.make_tensor_value_info(f"{name}_out", kind, None) for name, kind, _ in infos]
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs))
    sample = RandomDataReader(model).get_next()
    assert sample is not None
    expected = np.random.RandomState(42).random_sample((1, 3, 32, 32)).astype(np.float32)
    np.testing.assert_array_equal(sample["image"], expected)
    assert sample["ids"].shape == (1, 16)
    reader = RandomDataReader(model, {}, {"image": [-1, 3], "ids": [2, 4]})
    sample = reader.get_next()
    assert sample is not None
    assert set(sample["ids"].ravel()) == {2, 3, 4}  # both ends are reached
    np.testing.assert_array_equal(sample["ids"].ravel(), np.random.RandomState(42).randint(2, 5, 16))
    assert reader.get_next() is None
    with pytest.raises(ValueError, match="RandomDataReaderInputShape': nothing for input 'ids'"):
        RandomDataReader(model, {"image": [1, 3, 4, 4]})
    with pytest.raises(ValueError, match="RandomDataReaderInputDataRange': nothing for input 'ids'"):
        RandomDataReader(model, {}, {"image": [0, 1]})


def test_path_and_cached_data_readers(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", images(5))
    reader = PathDataReader(tiny_model(), str(tmp_path))
    assert len(reader) == 1  # a file of a folder is one sample
    assert rows(PathDataReader(tiny_model(), str(tmp_path / "x.npy"))) == EXPECTED[:5]
    cached = CachedDataReader(Reader([{"x": images(1)} for _ in range(6)]), data_size=4, quantize_fp16=True)
    assert len(cached) == 4
    assert cached.get_next()["x"].dtype == np.float16  # type: ignore[index]
    with pytest.raises(InvalidValueError, match="no samples"):
        CachedDataReader(Reader([]))


@pytest.mark.parametrize(("count", "expected"), [(None, EXPECTED), (4, EXPECTED[:4]), (10, EXPECTED)])
def test_in_order_are_all_that_were_asked_for_held_out_or_not(count, expected):
    samples = open_samples(Reader([{"x": image[None]} for image in images(10)]), IMAGE, count=count)
    samples.hold_none_out()
    assert [float(each["x"].flat[0]) for each in samples.in_order()] == expected


def test_no_room_for_samples_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full takes nothing, as a full disk."""

    def full(**_: object) -> object:
        return open("/dev/full", "r+b")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    store = SampleStore(memory_bytes=10)
    with pytest.raises(OutputError, match=r"0 samples are read.*No space left on device; set TMPDIR"):
        store.append({"x": np.zeros(100, np.float32)})
