"""The small vision transformer of CIFAR-10: what it is trained on, and that its script runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from bench.cifar_judge import prepare
from bench.train_vit import Attention, VisionTransformer, augment, main, mix, near_identity

COUNT = 12


def test_augmented_images_stay_in_range() -> None:
    torch.manual_seed(0)
    images = torch.rand(COUNT, 3, 32, 32)
    changed = augment(images)
    assert changed.shape == images.shape
    assert changed.min() >= 0
    assert changed.max() <= 1
    assert not torch.equal(changed, images)


def test_mixed_classes_are_probabilities_of_what_the_image_shows() -> None:
    torch.manual_seed(0)
    classes = torch.arange(200) % 10
    images = classes.float().reshape(-1, 1, 1, 1).expand(-1, 3, 32, 32)
    mixed, target = mix(images, classes)
    torch.testing.assert_close(target.sum(dim=1), torch.ones(200))
    shown = mixed[:, 0].reshape(200, -1)
    is_erased = (target.max(dim=1).values == 1) & (shown == 0).any(dim=1)
    expected = (target * torch.arange(10.0)).sum(dim=1)
    torch.testing.assert_close(shown.mean(dim=1)[~is_erased], expected[~is_erased])


def test_attention_begins_near_the_identity() -> None:
    torch.manual_seed(0)
    attention = Attention()
    near_identity(attention)
    value = attention.qkv.weight[2 * 256 :]
    product = attention.out.weight @ value
    assert -0.5 < product.diagonal().mean() < -0.3
    assert abs(product.mean()) < 0.01


@pytest.mark.filterwarnings("ignore")  # of torch's exporter
def test_the_script_writes_a_network_for_any_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    arrays = {f"{part}_x": generator.integers(0, 256, (COUNT, 32, 32, 3), np.uint8) for part in ("train", "test")}
    labels = {f"{part}_y": np.arange(COUNT) % 10 for part in ("train", "test")}
    np.savez(tmp_path / "cifar.npz", **arrays, **labels)
    data, out = str(tmp_path / "cifar.npz"), tmp_path / "out"
    options = ["--steps", "1", "--batch", "4", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["train_vit.py", "--data", data, data, "--out", str(out), *options])
    main()
    facts = json.loads((out / "vit_cifar.json").read_text())
    assert facts["steps"] == 1
    model = VisionTransformer().eval()
    model.load_state_dict(torch.load(out / "vit_cifar.pt"))
    images = prepare(arrays["test_x"])
    with torch.no_grad():
        expected = model(torch.from_numpy(images)).numpy()
    assert facts["top1_percent"] == pytest.approx(100 * (expected.argmax(axis=1) == labels["test_y"]).mean())
    runtime = pytest.importorskip("onnxruntime")
    onnx.checker.check_model(out / "vit_cifar.onnx")
    session = runtime.InferenceSession(out / "vit_cifar.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": images})
    np.testing.assert_allclose(found, expected, atol=1e-4)
