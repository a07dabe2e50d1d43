"""Whatever a loader gives, the model's inputs are found in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from quark.errors import InvalidValueError
from quark.torch.capture import Batches, CallSignature, read_batch

X, Y = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 0])


@pytest.mark.parametrize(
    "item",
    [
        X,
        (X, Y),
        [X, Y],
        {"x": X, "y": Y},
        {"pixels": X, "label": Y},
        ((X,), Y),
        X.numpy(),
    ],
    ids=["tensor", "tuple", "list", "mapping", "other name", "nested", "array"],
)
def test_the_inputs_are_found(item: Any) -> None:
    (found,) = read_batch(item, CallSignature(("x",)))[1]
    assert torch.equal(found, X)


def test_several_inputs_come_in_the_order_of_the_model() -> None:
    first, second = read_batch({"b": Y, "a": X}, CallSignature(("a", "b")))[1]
    assert torch.equal(first, X)
    assert torch.equal(second, Y)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("text", "expected a tensor for input 'x', got str"),
        ({"a": X, "b": X}, "has the keys a, b, and the model has the inputs x"),
        ((), "holds 0 tensors"),
        (torch.tensor([float("nan")]), "NaN or Inf"),
    ],
)
def test_what_has_no_inputs_is_refused(item: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        read_batch(item, CallSignature(("x",)))[1]


def test_an_empty_loader_is_refused() -> None:
    empty = DataLoader(TensorDataset(X[:0]), batch_size=2)
    with pytest.raises(InvalidValueError, match="the calibration data is empty"):
        Batches(empty, CallSignature(("x",)))


def test_what_cannot_be_iterated_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="expected a DataLoader.*got int"):
        Batches(3, CallSignature(("x",)))


@pytest.mark.parametrize("most_in_memory", [1 << 30, 0], ids=["in memory", "in a file"])
def test_batches_of_a_generator_can_be_read_again(most_in_memory: int) -> None:
    given = [torch.rand(2, 3, dtype=torch.float16), torch.randint(0, 9, (4, 3)), torch.rand(1, 3).double()]
    batches = Batches((each for each in given), CallSignature(("x",)), most_in_memory)
    for _ in range(2):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for (a,), b in zip(batches, given, strict=True))
    assert len(batches) == 3
    assert batches.samples == 7


def test_a_batch_is_not_changed_by_who_reads_it() -> None:
    batches = Batches([np.ones((1, 2), np.float32)], CallSignature(("x",)))
    assert next(iter(batches))[0].dtype is torch.float32


def test_the_last_flat_tensor_of_a_tuple_is_labels_and_others_are_inputs(caplog: pytest.LogCaptureFixture) -> None:
    signature = CallSignature(("x", "lengths"), defaults={"lengths": None})
    lengths, labels = torch.tensor([3, 2]), torch.tensor([0, 1])
    call, batch = read_batch((torch.rand(2, 3), lengths, labels), signature)
    assert call.names == ("x", "lengths")
    assert batch[1] is lengths or torch.equal(batch[1], lengths)
    assert not caplog.records
    call, _ = read_batch((torch.rand(2, 3), lengths), signature)
    assert call.names == ("x",)
    assert "is not handed to the input 'lengths'; if it is that input, pass dictionaries" in caplog.text
