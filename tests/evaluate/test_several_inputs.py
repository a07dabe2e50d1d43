"""What a folder of arrays, or of images, is answered by for a network with several inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_models import Net

from quark.errors import InvalidValueError, ModelError
from quark.evaluate.datasets import open_dataset
from quark.evaluate.network import Network


@pytest.fixture
def network(tmp_path: Path) -> Network:
    net = Net()
    net.node("Add", net.input("left", (1, 3, 8, 8)), net.input("right", (1, 3, 8, 8)), output="y")
    onnx.save(net.model("y"), tmp_path / "two.onnx")
    return Network(tmp_path / "two.onnx")


def test_a_folder_of_arrays_is_for_the_report(network: Network, tmp_path: Path) -> None:
    np.savez(tmp_path / "0.npz", left=np.zeros((1, 3, 8, 8), np.float32), right=np.zeros((1, 3, 8, 8), np.float32))
    with pytest.raises(InvalidValueError, match="'quark report --calib FOLDER' compares on .npz samples"):
        open_dataset(tmp_path, network)


def test_images_are_for_one_input(network: Network, tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(b"")
    with pytest.raises(ModelError, match=r"it has 'left' .*, 'right' .*; give a .npz file with an array"):
        open_dataset(tmp_path, network)
