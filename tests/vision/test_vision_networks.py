"""The networks have torchvision's names and shapes, and take its files; other files are refused by the first name."""

from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import InvalidValueError, UnknownNameError
from quark.vision.networks import NETWORKS, build_network, load_network

# entries of torchvision's state dicts, as published: how many, how many parameters, and shapes that tell the layout
PUBLISHED = {
    "resnet18": (122, 11_689_512, {"layer2.0.downsample.0.weight": (128, 64, 1, 1), "fc.weight": (1000, 512)}),
    "resnet34": (218, 21_797_672, {"layer3.5.conv2.weight": (256, 256, 3, 3), "fc.bias": (1000,)}),
    "resnet50": (320, 25_557_032, {"layer4.2.bn3.running_var": (2048,), "layer1.0.conv3.weight": (256, 64, 1, 1)}),
    "mobilenetv2": (
        314,
        3_504_872,
        {
            "features.1.conv.0.0.weight": (32, 1, 3, 3),
            "features.2.conv.1.0.weight": (96, 1, 3, 3),
            "features.17.conv.3.running_mean": (320,),
            "features.18.0.weight": (1280, 320, 1, 1),
            "classifier.1.weight": (1000, 1280),
        },
    ),
    "cifar_resnet20": (116, 269_722, {"layer2.0.conv1.weight": (32, 16, 3, 3), "linear.weight": (10, 64)}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_are_the_published_ones(name):
    entries, parameters, shapes = PUBLISHED[name]
    network = build_network(name, 10 if name.startswith("cifar") else 1000)
    state = network.state_dict()
    assert len(state) == entries
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert {key: tuple(state[key].shape) for key in shapes} == shapes


@pytest.mark.parametrize("name", NETWORKS)
@torch.inference_mode()
def test_every_network_runs_on_any_batch_and_size(name):
    network = build_network(name, 7).eval()
    images = torch.randn(3, 3, 32, 32)
    scores = network(images)
    assert scores.shape == (3, 7)
    assert torch.allclose(network(images[:1]), scores[:1], atol=1e-4)
    assert network(torch.randn(1, 3, 64, 96)).shape == (1, 7)


def test_one_relu_serves_a_block_in_place():
    block = build_network("resnet18", 2).get_submodule("layer1.0")
    relus = [module for module in block.modules() if isinstance(module, nn.ReLU)]
    assert len(relus) == 1
    assert relus[0].inplace


def test_the_two_resnet50_differ_where_the_stride_is():
    first, second = build_network("resnet50", 2), build_network("resnet50_v1", 2)
    assert {name: each.shape for name, each in first.state_dict().items()} == {
        name: each.shape for name, each in second.state_dict().items()
    }
    strides: list[Any] = [
        tuple(value.get_submodule(f"layer2.0.{name}").stride for name in ("conv1", "conv2"))
        for value in (first, second)
    ]
    assert strides == [((1, 1), (2, 2)), ((2, 2), (1, 1))]


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    return build_network("cifar_resnet20", 6).eval()


def plain(state):
    return state


def from_data_parallel(state):
    counted = {name: each for name, each in state.items() if not name.endswith("num_batches_tracked")}
    return {"best_prec1": 91.7, "state_dict": {f"module.{name}": each for name, each in counted.items()}}


@pytest.mark.parametrize("wrapped", [plain, from_data_parallel])
def test_a_file_gives_the_network_back_with_its_number_of_classes(trained, tmp_path, wrapped):
    torch.save(wrapped(trained.state_dict()), tmp_path / "net.pth")
    loaded = load_network("cifar_resnet20", tmp_path / "net.pth")
    assert not loaded.training
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(loaded(images), trained(images))


def without_a_name(state):
    del state["layer2.0.bn1.weight"]


def with_another_shape(state):
    state["layer1.0.conv1.weight"] = torch.zeros(16, 16, 1, 1)


def with_a_name_too_many(state):
    state["layer9.weight"] = torch.zeros(1)
    state["linear.bias"] = state.pop("linear.bias")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_name, r"have no 'layer2\.0\.bn1\.weight'.*another network"),
        (with_another_shape, r"'layer1\.0\.conv1\.weight' has shape \[16, 16, 1, 1\], expected \[16, 16, 3, 3\]"),
        (with_a_name_too_many, r"have 'layer9\.weight', which the network has not"),
    ],
)
def test_the_first_wrong_name_is_named(trained, tmp_path, change, message):
    state = dict(trained.state_dict())
    change(state)
    torch.save(state, tmp_path / "net.pth")
    with pytest.raises(InvalidValueError, match=message):
        load_network("cifar_resnet20", tmp_path / "net.pth")


def test_what_is_no_state_dict_is_refused(trained, tmp_path):
    file = tmp_path / "net.pth"
    with pytest.raises(InvalidValueError, match="no such file"):
        load_network("resnet18", file)
    with pytest.raises(InvalidValueError, match="folder"):
        load_network("resnet18", tmp_path)
    file.write_bytes(b"\x80\x02garbage")
    with pytest.raises(InvalidValueError, match="cannot be read"):
        load_network("resnet18", file)
    torch.save(trained, file)
    with pytest.raises(InvalidValueError, match="state_dict"):
        load_network("cifar_resnet20", file)
    torch.save({"epoch": 3}, file)
    with pytest.raises(InvalidValueError, match="no state dict"):
        load_network("cifar_resnet20", file)
    torch.save(trained.state_dict(), file)
    with pytest.raises(InvalidValueError, match=r"have no 'bn1\.weight'|'conv1\.weight' has shape"):
        load_network("resnet18", file)


def test_an_unknown_network_offers_the_nearest(tmp_path):
    with pytest.raises(UnknownNameError, match="mobilenetv2"):
        load_network("mobilenet_v2", tmp_path / "net.pth")
    with pytest.raises(UnknownNameError, match="resnet18"):
        build_network("resnet81", 10)
