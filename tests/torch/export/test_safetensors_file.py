"""What is read back gives the same outputs, bit for bit; and what does not fit is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from frozen_networks import Style, example_of, float_network, frozen_network
from safetensors.torch import load_file, save_file

from quark.errors import ModelError, QuarkError, UnsupportedTypeError
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import FORMATS, get_format
from quark.formats.spec import BlockFormat
from quark.plan import BlockChoice, FloatChoice
from quark.rounded import rounded
from quark.torch.export import export_safetensors, load_safetensors
from quark.torch.export.parity import outputs_of
from quark.torch.export.safetensors_file import restore, store
from quark.torch.train.networks import FrozenNetwork

torch.set_num_threads(1)
STYLES = ["int8", "int8_pof2", "uint16", "int4_groups", "mxfp4", "mx6", "bfp16", "bfloat16", "float16", "dynamic"]


def spoilt(name: str, style: str) -> FrozenNetwork:
    """The same architecture with other numbers."""
    network = frozen_network(name, style)
    for key, value in network.state_dict().items():
        if value.is_floating_point():
            value.mul_(0.5 if key.endswith("scale") else 0.3)
    return network


@pytest.mark.parametrize(
    ("name", "style"), [*(("plain", style) for style in STYLES), *(("attention", style) for style in STYLES[3:6])]
)
def test_a_network_comes_back_bit_for_bit(name: str, style: str, tmp_path: Path) -> None:
    network, x = frozen_network(name, style), example_of(name)
    export_safetensors(network, tmp_path / "folder")
    loaded = load_safetensors(spoilt(name, style), tmp_path / "folder")
    for actual, expected in zip(outputs_of(loaded, (x,)), outputs_of(network, (x,)), strict=True):
        assert actual.tobytes() == expected.tobytes()
    assert loaded.plan == network.plan
    assert loaded.configuration == network.configuration
    assert sorted(each.name for each in (tmp_path / "folder").iterdir()) == ["model.safetensors", "quark_network.json"]


@pytest.mark.parametrize(
    ("style", "dtype", "kind", "bytes_each"),
    [
        ("int8", torch.int8, "codes", 1),
        ("weight_only_int4", torch.uint8, "packed", 0.5),
        ("mxfp4", torch.uint8, "packed", 0.5),
        ("bfloat16", torch.bfloat16, "float", 2),
    ],
)
def test_weights_are_stored_in_their_true_types(style, dtype, kind, bytes_each, tmp_path) -> None:
    weights, config = export_safetensors(frozen_network("attention", style), tmp_path)
    tensor, entry = load_file(weights)["query.weight"], json.loads(config.read_text())["tensors"]["query.weight"]
    assert tensor.dtype is dtype
    assert tensor.nbytes == 32 * 32 * bytes_each
    assert entry["kind"] == kind
    assert entry["shape"] == [32, 32]


def test_float_numbers_where_codes_are_not_wanted(tmp_path: Path) -> None:
    network, x = frozen_network("plain", "int8"), example_of("plain")
    weights, _ = export_safetensors(network, tmp_path, has_codes=False)
    assert load_file(weights)["features.0.weight"].dtype is torch.float32
    loaded = load_safetensors(spoilt("plain", "int8"), tmp_path)
    assert outputs_of(loaded, (x,))[0].tobytes() == outputs_of(network, (x,))[0].tobytes()


BLOCKS = [fmt for fmt in FORMATS.values() if isinstance(fmt, BlockFormat)]


@pytest.mark.parametrize("fmt", BLOCKS, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_packed_blocks_are_rounded_to_themselves(fmt: BlockFormat, axis: int) -> None:
    """Also where a block would get another scale if it were rounded again, and where scales are subnormal."""
    values = torch.randn(40, 72, generator=torch.Generator().manual_seed(1))
    values[:20, :36] *= 2e-5
    choice = BlockChoice(BlockQuantizer(fmt).fixed(values), axis)
    stored, tensors = store("w", values, choice)
    assert stored.kind == "packed"
    again = rounded(restore("w", stored, tensors, choice).numpy(), choice)
    np.testing.assert_array_equal(again, rounded(values.numpy(), choice))


def test_a_tensor_scale_that_is_still_to_be_found_is_stored_as_float_numbers() -> None:
    choice = BlockChoice(BlockQuantizer(get_format("nvfp4")), 1)
    stored, tensors = store("w", torch.ones(4, 32), choice)
    assert stored.kind == "float"
    assert tensors["w"].dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("axis", [None, 0])
def test_8_bit_floats_are_stored_in_their_own_type(dtype: torch.dtype, axis: int | None) -> None:
    values = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
    name = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}[dtype]
    scale = (0.003,) if axis is None else tuple((torch.arange(24).double() * 1e-3 + 1e-3).tolist())
    choice = FloatChoice(name, True, scale, axis)
    stored, tensors = store("w", values, choice)
    assert stored.kind == "codes"
    assert tensors["w"].dtype is dtype
    assert tensors["w.scale"].numel() == len(scale)
    again = rounded(restore("w", stored, tensors, choice).numpy(), choice)
    np.testing.assert_array_equal(again, rounded(values.numpy(), choice))
    with pytest.raises(ModelError, match="its scale is not that of the plan"):
        restore("w", stored, {**tensors, "w.scale": 2 * tensors["w.scale"]}, choice)
    with pytest.raises(ModelError, match="expected fp8"):
        restore("w", stored, {**tensors, "w": values}, choice)


def test_numbers_that_have_no_codes_are_stored_as_they_are() -> None:
    values = torch.tensor([[1.0, float("nan"), 2.0, float("inf")] * 8])
    choice = BlockChoice(BlockQuantizer(BLOCKS[0]), 1)
    stored, tensors = store("w", values, choice)
    restored = restore("w", stored, tensors, choice).numpy()
    np.testing.assert_array_equal(rounded(restored, choice), rounded(values.numpy(), choice))


def test_a_float_network_has_nothing_to_store(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTypeError, match="quantized network"):
        export_safetensors(float_network("plain"), tmp_path)


def test_a_file_of_another_network_is_refused(tmp_path: Path) -> None:
    export_safetensors(frozen_network("plain", "int8"), tmp_path)
    with pytest.raises(ModelError, match="quantized to int32 per channel in the file, and to nothing"):
        load_safetensors(frozen_network("residual", "int8"), tmp_path)
    with pytest.raises(ModelError, match="int32 per channel in the file, and to int32 in the network"):
        load_safetensors(frozen_network("plain", Style("int8", "int8", is_per_channel=False, has_bias=True)), tmp_path)


def edited(folder: Path, name: str, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors, name)
    save_file(tensors, folder / "model.safetensors")


HOSTILE = {
    "no file": lambda folder: (folder / "model.safetensors").unlink(),
    "no config": lambda folder: (folder / "quark_network.json").unlink(),
    "no json": lambda folder: (folder / "quark_network.json").write_text("["),
    "a list": lambda folder: (folder / "quark_network.json").write_text("[]"),
    "cut off": lambda folder: (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:-10]
    ),
    "a header that lies": lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64),
    "missing": lambda folder: edited(folder, "features.0.weight", lambda t, n: t.pop(n)),
    "too much": lambda folder: edited(folder, "other", lambda t, n: t.update({n: torch.zeros(1)})),
    "shape": lambda folder: edited(folder, "features.0.weight", lambda t, n: t.update({n: t[n][:2].clone()})),
    "type": lambda folder: edited(folder, "features.0.weight", lambda t, n: t.update({n: t[n].float()})),
    "scale": lambda folder: edited(folder, "features.0.weight.scale", lambda t, n: t.update({n: t[n] * 2})),
}


@pytest.mark.parametrize("what", list(HOSTILE))
def test_files_that_are_not_as_they_should_be_are_refused(what: str, tmp_path: Path) -> None:
    network = frozen_network("plain", "int8")
    export_safetensors(network, tmp_path)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    HOSTILE[what](tmp_path)
    with pytest.raises(QuarkError):
        load_safetensors(network, tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


@pytest.mark.parametrize(
    "entry",
    [None, {}, {"kind": "pickle"}, {"shape": [1, "x"]}, {"shape": [10**12]}, {"dtype": "Tensor"}, {"parts": []}],
)
def test_a_description_that_is_none_is_refused(entry: dict[str, object] | None, tmp_path: Path) -> None:
    network = frozen_network("plain", "int8")
    _, config = export_safetensors(network, tmp_path)
    content = json.loads(config.read_text())
    own = content["tensors"]["features.0.weight"]
    content["tensors"]["features.0.weight"] = {**own, **entry} if entry else entry
    config.write_text(json.dumps(content))
    with pytest.raises(QuarkError):
        load_safetensors(network, tmp_path)
