"""Networks and examples that cannot be written as ONNX: the error names what is in the way, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quark.torch.export import ExportError, write_onnx

X = torch.rand(2, 4)


class Returning(torch.nn.Module):
    """A layer, whose result is handed on in one way or another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        return {
            "nothing": None,
            "a number": (y, 3),
            "text": {"y": y, "kind": "a name"},
            "a size": [y, x.shape[0]],
            "None beside it": (y, None),
            "the input": (y, x),
        }[self.kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", "returns nothing.*let its forward return tensors"),
        ("a number", "output 1 of the network.* is 3: .*Let the forward return tensors only"),
        ("text", "output 1 of the network.* is 'a name': .*tensors only"),
        ("a size", "output 1 of the network.* is a size, .*tensors only"),
    ],
)
def test_outputs_that_are_no_tensors(kind: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        write_onnx(Returning(kind), X, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["None beside it", "the input"])
def test_none_is_left_out_and_an_input_is_an_output(kind: str, tmp_path: Path) -> None:
    report = write_onnx(Returning(kind), X, tmp_path / "m.onnx")
    assert report.parity is not None
    assert report.parity.sqnr_db > 60


def test_an_example_that_the_network_does_not_run_on(tmp_path: Path) -> None:
    program = torch.export.export(torch.nn.Linear(4, 4), (X,), strict=False)
    with pytest.raises(ExportError, match=r"example input: .* does not run on float32\[2, 5\] on cpu: .*shapes"):
        write_onnx(program, torch.rand(2, 5), tmp_path / "m.onnx")
