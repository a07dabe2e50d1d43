"""Distillation: the interpreter computes what ONNX Runtime does, and training brings networks closer to float."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx_models import Net, random_feed, residual, run_model, transformer_block

from quark.demo import network_path
from quark.demo.digits import load_digits
from quark.errors import InvalidValueError, ModelError
from quark.features.distillation import training
from quark.features.distillation.augmentation import Augmentation, cut_and_mirrored, mixed, takes_images
from quark.features.distillation.descent import Descent
from quark.features.distillation.feed import Feed
from quark.features.distillation.options import DistillationOptions
from quark.features.distillation.training import Distillation, Distilled, OutputKind, kind_of, output_loss
from quark.features.finetuning import network
from quark.features.finetuning.network import OnnxNetwork, choices_of
from quark.features.finetuning.operators import OPERATORS
from quark.onnx import get_default_config, quantize
from quark.onnx.load import load
from quark.onnx.session import open_session
from quark.plan import AffineChoice, QuantizationPlan, Reader, Role, TensorChoice
from quark.rounded import rounded
from quark.torch import from_onnx


def shapes() -> onnx.ModelProto:
    """A network that computes shapes: [1, 4, 6] cut, gathered, split and put together again."""
    net = Net(opset=17)
    x = net.input("x", (1, 4, 6))
    size = net.node("Gather", net.node("Shape", x), net.constant(np.array(1, np.int64)))
    flat = net.node(
        "Concat", net.integers([1]), net.node("Unsqueeze", size, net.integers([0])), net.integers([-1]), axis=0
    )
    halves = net.nodes_of(
        "Split", net.node("Reshape", x, flat), net.integers([2, 4]), axis=2, outputs=["left", "right"]
    )
    cut = net.node("Slice", halves[1], *(net.integers([value]) for value in (-1, -9, 2, -2)))
    grown = net.node("Expand", net.node("ReduceMean", halves[0], axes=[2]), net.node("Shape", cut))
    is_larger = net.node("Greater", cut, grown)
    return net.model(net.node("Where", is_larger, cut, grown), net.node("Cast", is_larger, to=1))


def resized() -> onnx.ModelProto:
    net = Net(opset=17)
    y = net.conv(net.input("x", (1, 3, 4, 4)), (3, 4))
    scales = net.constant(np.array([1, 1, 2, 2], np.float32))
    near = net.node(
        "Resize", y, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )
    return net.model(near, net.node("Resize", y, "", scales, mode="linear"))


@pytest.mark.parametrize(
    "model", [residual(), transformer_block(), shapes(), resized()], ids=["cnn", "vit", "shapes", "up"]
)
def test_a_module_computes_what_the_runtime_does(model: onnx.ModelProto) -> None:
    feed = random_feed(model)
    expected = list(run_model(model, feed).values())
    with torch.no_grad():
        found = from_onnx(model)(**{name: torch.from_numpy(each) for name, each in feed.items()})
    for mine, theirs in zip(found if isinstance(found, tuple) else (found,), expected, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-4, atol=1e-5)


WHERE = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "asymmetric", "align_corners")
ROUNDING = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def resized_by(scales: tuple[float, ...], is_by_size: bool, **attributes: Any) -> onnx.ModelProto:
    net = Net(opset=19)
    x = net.input("x", (1, 3, 4, 6))
    sizes = np.array([int(a * b) for a, b in zip((1, 3, 4, 6), scales, strict=True)])
    given = ("", net.constant(sizes)) if is_by_size else (net.constant(np.array(scales, np.float32)),)
    return net.model(net.node("Resize", x, "", *given, **attributes))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("rounding", ROUNDING)
def test_the_nearest_number_is_that_of_the_runtime(where: str, rounding: str) -> None:
    modes = {"mode": "nearest", "coordinate_transformation_mode": where, "nearest_mode": rounding}
    for scales in ((1, 1, 2, 2), (1, 1, 3, 3), (1, 1, 0.5, 1.3), (1, 1, 0.25, 2.5), (2, 1, 2, 1)):
        for is_by_size in (False, True):
            model = resized_by(scales, is_by_size, **modes)
            feed = random_feed(model)
            (expected,) = run_model(model, feed).values()
            np.testing.assert_array_equal(from_onnx(model)(x=torch.from_numpy(feed["x"])).numpy(), expected)


@pytest.mark.parametrize(
    "attributes",
    [
        {"mode": "linear", "antialias": 1},
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
        {"mode": "cubic"},
        {"mode": "nearest", "coordinate_transformation_mode": "tf_crop_and_resize"},
    ],
    ids=str,
)
def test_a_resize_that_torch_computes_otherwise_is_refused(attributes: dict[str, Any]) -> None:
    model = resized_by((1, 1, 0.5, 0.5), False, **attributes)
    with pytest.raises(ModelError, match="is not computed here"):
        from_onnx(model)(x=torch.zeros(1, 3, 4, 6))


def test_a_module_trains_and_goes_back_into_a_file(tmp_path: Path) -> None:
    module = from_onnx(network_path())
    x = torch.from_numpy(np.random.default_rng(0).random((4, 1, 8, 8), dtype=np.float32))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        loss = module(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    module.save(tmp_path / "trained.onnx")
    (written,) = open_session(onnx.load(tmp_path / "trained.onnx"), threads=1).run(None, {"input": x.numpy()})
    np.testing.assert_allclose(written, module(x).detach().numpy(), rtol=1e-4, atol=1e-4)


def test_integers_are_divided_as_integers() -> None:
    size, parts = torch.tensor([98, -7]), torch.tensor([3, 2])
    assert OPERATORS["Div"]((size, parts), {}).tolist() == [32, -3]
    assert OPERATORS["Div"]((size / 4, parts), {})[1] == -0.875


@pytest.mark.parametrize("names", [("_last_use", "training"), ("a.b", "a_b"), ("forward", ""), ("_lists", "\x1b[31m")])
def test_constants_may_have_any_name(names: tuple[str, str]) -> None:
    net = Net(opset=17)
    first, second = (net.constant(np.random.default_rng(i).normal(size=(4, 4)).astype(np.float32)) for i in (0, 1))
    model = net.model(net.node("MatMul", net.node("MatMul", net.input("x", (1, 4)), first), second))
    for node in model.graph.node:
        node.input[1] = names[0] if node.input[1] == first else names[1] or "c"
    for tensor, name in zip(model.graph.initializer, names, strict=True):
        tensor.name = name or "c"
    feed = random_feed(model)
    (expected,) = run_model(model, feed).values()
    found = from_onnx(model)(x=torch.from_numpy(feed["x"]))
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-5)


def test_operators_without_a_row_are_named() -> None:
    net = Net(opset=17)
    x = net.input("x", (2, 3))
    model = net.model(net.node("Sin", net.node("Det", net.node("MatMul", x, net.weight(3, 2))), name="waves"))
    with pytest.raises(ModelError, match=r"Det \('.*'\), Sin \('waves'\)"):
        from_onnx(model)


def test_inputs_are_checked() -> None:
    with pytest.raises(InvalidValueError, match=r"expected \['input'\]"):
        from_onnx(network_path())(image=torch.zeros(1, 1, 8, 8))


def test_quantizers_are_those_of_the_plan() -> None:
    net = Net(opset=17)
    model = net.model(
        net.node("MatMul", net.input("x", (1, 4)), net.constant(np.eye(4, dtype=np.float32)), name="product")
    )
    coarse = AffineChoice("int8", (0.5,), (0,))
    plan = QuantizationPlan((TensorChoice("x", Role.ACTIVATION, coarse, (Reader("product", 0),)),))
    x = torch.tensor([[0.2, 0.3, 70.0, -0.9]], requires_grad=True)
    found = OnnxNetwork(load(model).model, choices_of(plan))(x)
    np.testing.assert_array_equal(found.detach().numpy(), [[0.0, 0.5, 63.5, -1.0]])
    found.sum().backward()
    np.testing.assert_array_equal(x.grad, [[1, 1, 0, 1]])  # none beyond the range


@pytest.mark.parametrize("is_softmax", [False, True])
def test_the_loss_of_class_scores_is_the_divergence(is_softmax: bool) -> None:
    p, q = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([[1.0, 0.5, 0.0]])
    wanted = (p.softmax(1) * (p.log_softmax(1) - q.log_softmax(1))).sum()
    expected, other = (p.softmax(1), q.softmax(1)) if is_softmax else (p, q + 3.0)
    found = output_loss(expected, other, kind_of(expected))
    torch.testing.assert_close(found, wanted)


def images(count: int) -> list[dict[str, Any]]:
    return [{"input": image[None]} for image in load_digits()[0].images[:count]]


def distilled(folder: Path) -> Any:
    config = get_default_config("MXFP4E2M1")
    options = {
        "Distillation": True,
        "DistillationSteps": 60,
        "DistillationRate": 0.01,
        "DistillationBatch": 32,
        "DistillationFolder": str(folder),
    }
    config.extra_options.update(options)
    return quantize(network_path(), images(280), config, num_samples=256)


def divergence(model: onnx.ModelProto) -> float:
    float_session, session = open_session(onnx.load(network_path()), threads=1), open_session(model, threads=1)
    unseen = load_digits()[1].images
    p, q = (torch.from_numpy(value.run(None, {"input": unseen})[0]) for value in (float_session, session))
    return float(output_loss(p, q, OutputKind.SCORES))


def test_distillation_comes_closer_to_float_and_repeats_itself(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    result = distilled(tmp_path / "first")
    facts = result.report.algorithms[-1]
    assert facts.name == "distillation"
    assert facts.changed
    plain = quantize(network_path(), images(280), get_default_config("MXFP4E2M1"), num_samples=256).model
    assert divergence(result.model) < 0.8 * divergence(plain)
    again = distilled(tmp_path / "second").model
    assert again.graph == result.model.graph


def test_weights_that_were_rounded_already_are_trained_from_what_they_were() -> None:
    """Otherwise the learning rate, a share of what rounding changes, would be 0."""
    torch.set_num_threads(1)
    plan = quantize(network_path(), images(16), get_default_config("MXFP4E2M1")).report.plan
    model = load(network_path()).model
    options = DistillationOptions(steps=20, batch_size=16, rate_share=0.01)
    rounded_model, floats = model.clone(), {}
    nodes = {node.name: node for node in rounded_model.graph}
    for tensor in plan:
        for reader in tensor.readers:
            if tensor.role is Role.WEIGHT:
                value = nodes[reader.node].inputs[reader.index]
                floats[value.name] = value.const_value.numpy()
                value.const_value = ir.tensor(rounded(floats[value.name], tensor.choice), name=value.name)

    def run(model: ir.Model, starts: dict[str, np.ndarray]) -> Distilled:
        student, teacher = OnnxNetwork(model.clone(), choices_of(plan)), OnnxNetwork(load(network_path()).model)
        return Distillation(student, teacher, images(64), images(96)[64:], options, None, starts).run()

    found, expected = run(rounded_model, floats), run(model, {})
    assert (found.before, found.after) == (expected.before, expected.after)
    assert found.after < found.before
    assert expected.weights is not None
    assert found.weights is not None
    for name, array in expected.weights.items():
        np.testing.assert_array_equal(found.weights[name], array)


def test_a_share_of_the_activations_is_not_rounded_while_it_trains() -> None:
    plan = quantize(network_path(), images(16), get_default_config("MXFP4E2M1")).report.plan
    x, student = torch.from_numpy(images(1)[0]["input"]), OnnxNetwork(load(network_path()).model, choices_of(plan))
    weights = OnnxNetwork(load(network_path()).model, {k: v for k, v in choices_of(plan).items() if k[1]})
    with torch.no_grad():
        plain = student(x)
    student.unrounded, student.chance = 0.5, torch.Generator().manual_seed(0)
    with torch.no_grad():
        torch.testing.assert_close(student(x), plain, rtol=0, atol=0)  # not where it is judged
    first, second = student(x).detach(), student(x).detach()
    assert not torch.equal(first, plain)
    assert not torch.equal(first, second)
    student.chance.manual_seed(0)
    torch.testing.assert_close(student(x).detach(), first, rtol=0, atol=0)
    student.unrounded = 1 - 1e-9  # weights stay rounded
    torch.testing.assert_close(student(x).detach(), weights(x).detach())


class InterruptionError(Exception):
    pass


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "KEPT_EVERY", 0.0)
    torch.set_num_threads(1)
    options = DistillationOptions(steps=20, batch_size=16, rate_share=0.01, unrounded_share=0.25)
    config = get_default_config("MXFP4E2M1")
    plan = quantize(network_path(), images(16), config).report.plan
    model = load(network_path()).model

    def run(state: Path, stop_at: int = 100) -> Any:
        calls = []

        def advance() -> None:
            calls.append(0)
            if len(calls) == stop_at:
                raise InterruptionError

        student = OnnxNetwork(model.clone(), choices_of(plan))
        teacher = OnnxNetwork(model.clone())
        return Distillation(student, teacher, images(64), images(96)[64:], options, state).run(advance)

    whole = run(tmp_path / "whole.pt")
    with pytest.raises(InterruptionError):
        run(tmp_path / "parts.pt", stop_at=9)
    assert (tmp_path / "parts.pt").exists()
    resumed = run(tmp_path / "parts.pt")
    assert (resumed.before, resumed.after, resumed.steps) == (whole.before, whole.after, whole.steps)
    assert whole.weights is not None
    for name, array in whole.weights.items():
        np.testing.assert_array_equal(resumed.weights[name], array)


def test_few_samples_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    config = get_default_config("MXFP4E2M1")
    config.extra_options |= {"Distillation": True, "DistillationSteps": 1}
    with caplog.at_level("WARNING", logger="quark"):
        quantize(network_path(), images(24), config)
    assert "distillation on 21 calibration samples" in caplog.text


def test_a_network_that_torch_cannot_compute_stays_as_it_was() -> None:
    net = Net(opset=17)
    y = net.node("Sin", net.node("Relu", net.conv(net.input("x", (1, 3, 6, 6)), (3, 4))), name="waves")
    config = get_default_config("XINT8")
    config.extra_options["Distillation"] = True
    data = [np.random.default_rng(i).random((1, 3, 6, 6), dtype=np.float32) for i in range(20)]
    facts = quantize(net.model(y), data, config).report.algorithms[-1]
    assert not facts.changed
    assert "Sin ('waves')" in facts.left[0].reason


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"batch_size": 0},
        {"rate_share": 0.0},
        {"mixed_share": 2.0},
        {"feature_weight": -1.0},
        {"augmentation": "flip"},
    ],
)
def test_impossible_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match="Distillation"):
        DistillationOptions(**wrong)


def test_images_are_recognized_by_their_shape() -> None:
    def is_cut(
        shape: tuple[int, ...], wanted: Augmentation = Augmentation.AUTO, dtype: torch.dtype = torch.float32
    ) -> bool:
        return takes_images({"input": torch.zeros(shape, dtype=dtype)}, wanted)

    assert is_cut((1, 3, 224, 224))
    assert not is_cut((1, 3, 8, 8))
    assert not is_cut((1, 80, 300))
    assert not is_cut((1, 1, 224, 224))
    assert is_cut((1, 1, 224, 224), Augmentation.IMAGES)
    assert not is_cut((1, 3, 224, 224), dtype=torch.uint8)
    for shape, dtype in (((1, 80, 300), torch.float32), ((1, 3, 224, 224), torch.uint8)):
        with pytest.raises(InvalidValueError, match="'images': input 'input' is"):
            is_cut(shape, Augmentation.IMAGES, dtype)
    assert not is_cut((1, 3, 224, 224), Augmentation.NONE)


def test_augmentation_repeats_itself_and_keeps_the_form_of_images() -> None:
    ramp = torch.linspace(0, 1, 40).expand(4, 3, 40, 40)  # grows to the right
    first, again = (cut_and_mirrored({"x": ramp}, np.random.default_rng(5))["x"] for _ in range(2))
    assert torch.equal(first, again)
    slopes = first[:, 0, 0, -1] - first[:, 0, 0, 0]
    assert bool((slopes.abs() > 0.4).all())  # the sides are at least half of the image's
    assert bool((slopes.abs() <= 1).all())
    assert len({bool(each) for each in np.sign(slopes.numpy()) > 0}) == 2  # some are mirrored
    batch = {"x": torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 3, 40, 40), "n": torch.arange(4)}
    images_only = mixed({"x": batch["x"]}, np.random.default_rng(1), are_images=True)["x"]
    numbers = mixed(batch, np.random.default_rng(2), are_images=False)
    assert torch.equal(numbers["n"], batch["n"])
    for value in (images_only, numbers["x"]):
        assert value.shape == (4, 3, 40, 40)
        assert not torch.equal(value, batch["x"])
        assert bool((value >= 0).all())
        assert bool((value <= 3).all())


def test_batches_count_as_their_rows() -> None:
    samples = [{"input": np.full((3, 2), i, np.float32)} for i in range(4)]
    feed = Feed(samples, torch.device("cpu"), can_stack=True)
    assert len(feed) == 12
    (batch, count), *others = feed.batches([0, 4, 11], 2)
    assert count == 2
    np.testing.assert_array_equal(batch["input"], [[0, 0], [1, 1]])
    np.testing.assert_array_equal(others[0][0]["input"], [[3, 3]])


def test_weights_that_are_rounded_together_are_rounded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = quantize(network_path(), images(16), get_default_config("MXFP4E2M1")).report.plan
    student = OnnxNetwork(load(network_path()).model, choices_of(plan))
    x = torch.from_numpy(images(1)[0]["input"])

    def computed() -> list[torch.Tensor]:
        found = student(x)
        return [found, *torch.autograd.grad(found.square().sum(), list(student.parameters()), materialize_grads=True)]

    expected = computed()
    assert not student._joined_constants()
    monkeypatch.setattr(network, "JOINED_ON", ("cpu",))
    assert student._joined_constants()
    for mine, theirs in zip(computed(), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_steps_are_replayed_and_train_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "HALF_ON", ())
    plan = quantize(network_path(), images(16), get_default_config("MXFP4E2M1")).report.plan
    model = load(network_path()).model
    captured, capture = [], Descent._capture

    def watched(self: Descent, batch: dict[str, torch.Tensor]) -> None:
        capture(self, batch)
        captured.append(self._graph)

    monkeypatch.setattr(Descent, "_capture", watched)

    def run(device: str) -> float:
        student = OnnxNetwork(model.clone(), choices_of(plan))
        options = DistillationOptions(steps=40, batch_size=16, rate_share=0.01, device=device)
        return Distillation(student, OnnxNetwork(model.clone()), images(256), images(512)[256:], options).run().after

    on_gpu = run("cuda")
    assert captured[0] is not None
    assert on_gpu == pytest.approx(run("cpu"), rel=0.3)  # other sums, and so another path


def distilled_from(model: onnx.ModelProto, data: list[Any], preset: str = "A8W4", **options: Any) -> Any:
    config = get_default_config(preset)
    config.extra_options |= {"Distillation": True, "DistillationSteps": 4, **options}
    return quantize(model, data, config).report.algorithms[-1]


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cuda:x", "cpu:1"])
def test_a_device_that_torch_does_not_have_is_refused_before_the_work(device: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=f"DistillationDevice '{device}'.*only cpu"):
        distilled_from(
            onnx.load(network_path()),
            [],
            DistillationDevice=device,
            DistillationFolder=str(tmp_path),
            UseRandomData=True,
        )


def test_a_run_that_kept_no_state_leaves_no_folder(tmp_path: Path) -> None:
    folder = {"DistillationFolder": str(tmp_path)}
    assert distilled_from(onnx.load(network_path()), images(24), **folder).name == "distillation"
    assert not list(tmp_path.iterdir())
    net = Net(seed=0)
    model = net.model(net.node("MatMul", net.input("x", (1, 16)), net.weight(16, 16)))
    data = [np.random.default_rng(i).normal(size=(1, 16)).astype(np.float32) for i in range(24)]
    with pytest.raises(InvalidValueError, match="expected float images"):
        distilled_from(model, data, DistillationAugmentation="images", **folder)
    assert not list(tmp_path.iterdir())


def test_samples_of_several_lengths_are_trained_on() -> None:
    net = Net(seed=0)
    y = net.node("Relu", net.node("MatMul", net.input("x", (1, "n", 16)), net.weight(16, 16)))
    model = net.model(net.node("MatMul", y, net.weight(16, 8)))
    rng = np.random.default_rng(0)
    data = [{"x": rng.normal(size=(1, n, 16)).astype(np.float32)} for n in (8, 8, *[5, 9, 7] * 8)]
    assert distilled_from(model, data).name == "distillation"


def test_images_of_integers_are_not_cut() -> None:
    net = Net(seed=0)
    x = net.node("Cast", net.input("x", (1, 3, 32, 32), dtype=np.uint8), to=1)
    y = net.node("GlobalAveragePool", net.conv(net.node("Mul", x, net.constant(np.float32(1 / 255))), (3, 8)))
    rng = np.random.default_rng(0)
    data = [{"x": rng.integers(0, 256, (1, 3, 32, 32)).astype(np.uint8)} for _ in range(24)]
    assert distilled_from(net.model(net.node("Flatten", y)), data).name == "distillation"


def test_a_network_that_returns_integers_alone_stays_as_it_was() -> None:
    net = Net(seed=0)
    y = net.node("MatMul", net.input("x", (1, 16)), net.weight(16, 16))
    model = net.model(net.node("Cast", net.node("Greater", y, net.constant(np.float32(0))), to=7))
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    data = [{"x": np.random.default_rng(i).normal(size=(1, 16)).astype(np.float32)} for i in range(24)]
    (left,) = distilled_from(model, data).left
    assert "no output" in left.reason


@pytest.mark.parametrize("content", [b"garbage", b"", [1, 2], {"numbers": (0.0, 0.0, 0, 9)}, None])
def test_a_state_that_cannot_be_read_is_ignored(
    content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(training, "KEPT_EVERY", 0.0)
    plan = quantize(network_path(), images(16), get_default_config("MXFP4E2M1")).report.plan
    model, state = load(network_path()).model, tmp_path / "state.pt"

    def run() -> Any:
        options = DistillationOptions(steps=4, batch_size=16)
        student, teacher = OnnxNetwork(model.clone(), choices_of(plan)), OnnxNetwork(model.clone())
        return Distillation(student, teacher, images(32), images(48)[32:], options, state).run()

    whole = run()
    if isinstance(content, bytes):
        state.write_bytes(content)
    else:
        kept = torch.load(state)
        kept["descent"]["square"].pop()  # of another network
        torch.save(kept if content is None else content, state)
    with caplog.at_level("WARNING", logger="quark"):
        again = run()
    assert "is ignored" in caplog.text
    assert (again.before, again.after, again.steps) == (whole.before, whole.after, 4)


def test_clipped_integers_stay_integers() -> None:
    net = Net(seed=0)
    limits = (net.constant(np.array(value, np.int64)) for value in (0, 9))
    index = net.node("Clip", net.input("i", (1, 4), dtype=np.int64), *limits)
    model = net.model(net.node("Gather", net.weight(10, 6), index))
    feed = {"i": np.array([[-3, 4, 9, 12]])}
    (expected,) = run_model(model, feed).values()
    found = from_onnx(model)(i=torch.from_numpy(feed["i"]))
    np.testing.assert_array_equal(found.detach().numpy(), expected)


class Replayed:
    """In the place of a CUDA graph."""

    def __init__(self) -> None:
        self.count = 0

    def replay(self) -> None:
        self.count += 1


def test_a_batch_of_another_shape_is_not_replayed() -> None:
    weight = torch.ones(3, requires_grad=True)
    descent = Descent({"w": weight}, {"w": 0.1}, lambda batch: (batch["x"] * weight).square().sum())
    graph: Any = Replayed()
    descent._graph, descent._batch = graph, {"x": torch.zeros(2, 3)}
    for number, rows in enumerate((2, 1, 2), 1):  # one row could be broadcast into two
        descent.step([({"x": torch.ones(rows, 3)}, 1.0)], number, 0.0, 1.0)
    assert graph.count == 2
    assert descent.read_loss() == pytest.approx(3 / 3)  # of the one that was computed
