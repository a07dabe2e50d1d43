"""Quantized language models as folders: written, loaded by us, and loaded by transformers with compressed-tensors."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_language_models import FP8, INT8, LAYERS, kv_cache, llama, logits_of, quantizer, token_ids

from quark.errors import InvalidValueError, ModelError, UnknownNameError, UnsupportedOptionError
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.language import saving
from quark.torch.language.linear import QuantizedLinear
from quark.torch.language.saving import skeleton_of
from quark.torch.quantization.config.config import Config, RotationConfig, SVDQuantConfig

transformers = pytest.importorskip("transformers")

LAYOUTS = ("quark", "compressed-tensors")
WEIGHTS, POST = "model.safetensors", {"kv_cache_post_rope": True}
NOT_THERE = {("quark", "int3 groups"), ("compressed-tensors", "fp8 e5m2"), ("compressed-tensors", "mxfp6")}


def quantized(name, exclude=None, *, is_tied=False, dtype=torch.float32, **options):
    model = llama(is_tied=is_tied, dtype=dtype)
    return quantizer(name, exclude, **options).quantize_model(model, token_ids())


def by_transformers(folder):
    pytest.importorskip("compressed_tensors")
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_saved_model_computes_the_same_bit_for_bit(layout, name, tmp_path):
    model = quantized(name)
    if (layout, name) in NOT_THERE:
        with pytest.raises(UnsupportedOptionError, match="have no such weights"):
            export_safetensors(model, tmp_path, layout)
        return
    weights, config = export_safetensors(model, tmp_path, layout)
    assert (weights.name, config.name) == ("model.safetensors", "config.json")
    loaded = import_model_from_safetensors(skeleton_of(type(model), model.config), tmp_path)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert not torch.equal(logits_of(loaded), logits_of(llama()))
    assert loaded.quark.settings.exclude == ("lm_head",)
    assert loaded.quark.settings.config == model.quark.settings.config


@pytest.mark.parametrize(
    "name", ["uint4 groups", "int4 groups", "int4 channels", "int3 groups", "int8 channels", "int8 asymmetric", "fp8"]
)
def test_transformers_loads_what_we_save(name, tmp_path):
    model = quantized(name)
    export_safetensors(model, tmp_path, "compressed-tensors")
    torch.testing.assert_close(logits_of(by_transformers(tmp_path)), logits_of(model), rtol=0, atol=1e-6)


def test_transformers_loads_mxfp4_and_several_types(tmp_path):
    model = quantized("mxfp4", dtype=torch.bfloat16)  # decompressed to bfloat16 there, so the model has to have that
    export_safetensors(model, tmp_path / "mxfp4", "compressed-tensors")
    torch.testing.assert_close(logits_of(by_transformers(tmp_path / "mxfp4")), logits_of(model), rtol=0, atol=2e-2)
    mixed = quantized("int4 groups", layer_quant_config={"*down_proj": LAYERS["int8 static"]})
    export_safetensors(mixed, tmp_path / "mixed", "compressed-tensors")
    config = json.loads((tmp_path / "mixed/config.json").read_text())["quantization_config"]
    assert (config["format"], len(config["config_groups"])) == ("mixed-precision", 2)
    torch.testing.assert_close(logits_of(by_transformers(tmp_path / "mixed")), logits_of(mixed), rtol=0, atol=1e-6)


def test_the_layout_of_amd_quark(tmp_path):
    """Names, types and shapes as AMD Quark 0.13 writes them for the same model."""
    export_safetensors(quantized("uint4 groups"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gate = {k.rpartition(".")[2]: (v.dtype, tuple(v.shape)) for k, v in tensors.items() if ".0.mlp.gate_proj" in k}
    assert gate == {
        "weight": (torch.int32, (64, 12)),
        "weight_scale": (torch.float32, (2, 96)),
        "weight_zero_point": (torch.int32, (2, 12)),
    }
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["exclude"], config["export"]["pack_method"]) == (
        "quark",
        ["lm_head"],
        "reorder",
    )
    assert config["global_quant_config"]["weight"]["dtype"] == "uint4"


def test_nibbles_are_packed_in_the_order_of_awq(tmp_path):
    model = quantized("int4 channels")
    linear = model.get_submodule("model.layers.0.mlp.up_proj")
    codes = linear.codes()[0, :8]
    for method, order in (("reorder", (0, 2, 4, 6, 1, 3, 5, 7)), ("order", range(8))):
        export_safetensors(model, tmp_path, pack_method=method)
        word = int(load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.up_proj.weight"][0, 0]) & 0xFFFFFFFF
        assert word == sum((int(codes[each]) & 15) << (4 * place) for place, each in enumerate(order))
        assert torch.equal(logits_of(import_model_from_safetensors(llama(), tmp_path)), logits_of(model))


def test_other_modes_of_amd_quark(tmp_path):
    awq, fp8 = quantized("uint4 groups"), quantized("fp8", kv_cache_quant_config=kv_cache(FP8, LAYERS["fp8"]), **POST)
    for model, mode, names in ((awq, "awq", {"q_proj.qweight", "q_proj.qzeros"}), (fp8, "fp8", {"k_scale", "v_scale"})):
        export_safetensors(model, tmp_path / mode, mode)
        assert {f"model.layers.0.self_attn.{name}" for name in names} < set(load_file(tmp_path / mode / WEIGHTS))
        config = json.loads((tmp_path / mode / "config.json").read_text())["quantization_config"]
        assert config["quant_method"] == mode
        assert torch.equal(logits_of(import_model_from_safetensors(llama(), tmp_path / mode)), logits_of(model))
    for model, mode in ((awq, "fp8"), (fp8, "awq")):
        with pytest.raises(UnsupportedOptionError, match="have no such weights"):
            export_safetensors(model, tmp_path, mode)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("exclude", [["lm_head"], []])
def test_tied_embeddings_are_stored_once_unless_the_head_is_quantized(layout, exclude, tmp_path):
    model = quantized("int4 groups", exclude, is_tied=True)
    export_safetensors(model, tmp_path, layout)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        heads = [name for name in file.keys() if name.startswith("lm_head")]  # noqa: SIM118
    assert bool(heads) == (not exclude)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] == bool(exclude)
    loaded = import_model_from_safetensors(llama(is_tied=True), tmp_path)
    assert torch.equal(logits_of(loaded), logits_of(model))
    if layout == "compressed-tensors":
        torch.testing.assert_close(logits_of(by_transformers(tmp_path)), logits_of(model), rtol=0, atol=1e-6)


def test_transposed_layers_of_gpt2_go_back_as_they_came(tmp_path):
    def make():
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 1, "n_head": 4}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()

    model = quantizer("int4 groups", ["lm_head", "*c_fc"]).quantize_model(make(), token_ids())
    export_safetensors(model, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["transformer.h.0.mlp.c_fc.weight"].shape == (64, 256)
    assert torch.equal(logits_of(import_model_from_safetensors(make(), tmp_path)), logits_of(model))
    with pytest.raises(UnsupportedOptionError, match="Conv1D"):
        export_safetensors(model, tmp_path, "compressed-tensors")


def test_large_models_are_split_and_old_files_removed(tmp_path, monkeypatch):
    model = quantized("fp8")
    source = tmp_path / "source"
    llama().save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    model.config._name_or_path = str(source)
    export_safetensors(model, tmp_path / "out")
    monkeypatch.setattr(saving, "SHARD_BYTES", 40_000)
    weights, _ = export_safetensors(model, tmp_path / "out")
    assert weights.name == "model.safetensors.index.json"
    files = sorted(os.listdir(tmp_path / "out"))
    assert {"model.safetensors", "tokenizer.json"} & set(files) == {"tokenizer.json"}
    assert len(files) > 5
    assert torch.equal(logits_of(import_model_from_safetensors(llama(), tmp_path / "out")), logits_of(model))
    assert str(source) not in (tmp_path / "out/config.json").read_text()


def test_nothing_is_written_if_a_weight_left_its_grid(tmp_path):
    model = quantized("int4 groups")
    linear = model.get_submodule("model.layers.1.mlp.up_proj")
    assert isinstance(linear, QuantizedLinear)
    linear.weight.add_(0.4 * linear.weight_scale.min())
    with pytest.raises(ModelError, match="model.layers.1.mlp.up_proj.*not on the grid"):
        export_safetensors(model, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []
    with pytest.raises(InvalidValueError, match="not quantized"):
        export_safetensors(llama(), tmp_path / "out")
    with pytest.raises(UnknownNameError, match="custom_mode"):
        export_safetensors(model, tmp_path / "out", "gguf")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_of_keys_and_values_is_saved(layout, tmp_path):
    for name, spec in (("int8 static", INT8), ("fp8", FP8)):
        cache = kv_cache(spec, LAYERS[name])
        model = quantized(name, kv_cache_quant_config=cache, kv_cache_post_rope=True)
        export_safetensors(model, tmp_path / name, layout)
        stored = load_file(tmp_path / name / "model.safetensors")
        key = "k_proj.output_scale" if layout == "quark" else "k_scale"
        assert f"model.layers.0.self_attn.{key}" in stored
        assert torch.equal(logits_of(import_model_from_safetensors(llama(), tmp_path / name)), logits_of(model))
        if layout == "compressed-tensors":
            torch.testing.assert_close(logits_of(by_transformers(tmp_path / name)), logits_of(model), rtol=0, atol=1e-6)
    before = quantized("fp8", kv_cache_quant_config=kv_cache(FP8, LAYERS["fp8"]))
    if layout == "compressed-tensors":
        with pytest.raises(UnsupportedOptionError, match="kv_cache_post_rope=True"):
            export_safetensors(before, tmp_path, layout)
        return
    export_safetensors(before, tmp_path, layout)
    assert torch.equal(logits_of(import_model_from_safetensors(llama(), tmp_path)), logits_of(before))


# ---------------------------------------------------------------- files that do not fit
@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    export_safetensors(quantized("int8 static"), folder, "quark")
    export_safetensors(quantized("uint4 groups"), folder / "compressed", "compressed-tensors")
    return folder


def spoil(folder, name, change):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("folder", "name", "change", "words"),
    [
        ("", f"{Q_PROJ}.weight", lambda _: None, "has no tensor"),
        ("", f"{Q_PROJ}.weight", lambda x: x[:32].clone(), "expected int8 of shape"),
        ("", f"{Q_PROJ}.weight", lambda x: x.to(torch.int32), "expected int8 of shape"),
        ("", f"{Q_PROJ}.weight_scale", lambda x: x * float("nan"), "zero or not finite"),
        ("", f"{Q_PROJ}.input_scale", lambda x: -x, "expected a number above 0"),
        ("", f"{Q_PROJ}.bias", lambda x: x[:5].clone(), "expected float of shape"),
        ("", "model.norm.weight", lambda x: x.to(torch.int64), "expected float of shape"),
        ("", "model.embed_tokens.weight", lambda x: x[:, :3].clone(), "expected float of shape"),
        ("compressed", f"{Q_PROJ}.weight_shape", lambda x: x + 1, "expected .64, 64."),
        ("compressed", f"{Q_PROJ}.weight_packed", lambda x: x[:, :3].clone(), "expected int32 of shape"),
        ("compressed", f"{Q_PROJ}.weight_scale", lambda x: x * 0, "zero or not finite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(saved, tmp_path, folder, name, change, words):
    shutil.copytree(saved / folder, tmp_path / "copy")
    spoil(tmp_path / "copy", name, change)
    with pytest.raises(ModelError, match=words):
        import_model_from_safetensors(llama(), tmp_path / "copy")


def test_other_models_and_bad_files_are_refused(saved, tmp_path):
    with pytest.raises(ModelError, match="no place for, such as 'model.layers.1"):
        import_model_from_safetensors(llama(layers=1), saved)
    with pytest.raises(ModelError, match="has no tensor 'model.layers.2"):
        import_model_from_safetensors(llama(layers=3), saved)
    with pytest.raises(ModelError, match="no place for, such as.*bias"):
        import_model_from_safetensors(llama(has_bias=False), saved)
    shutil.copytree(saved, tmp_path / "copy")
    content = (tmp_path / "copy/model.safetensors").read_bytes()
    (tmp_path / "copy/model.safetensors").write_bytes(content[:-100])
    with pytest.raises(ModelError, match="cannot read"):
        import_model_from_safetensors(llama(), tmp_path / "copy")
    (tmp_path / "copy/model.safetensors").unlink()
    with pytest.raises(ModelError, match="neither"):
        import_model_from_safetensors(llama(), tmp_path / "copy")
    (tmp_path / "copy/model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    with pytest.raises(ModelError, match="the name of a safetensors file in the same folder"):
        import_model_from_safetensors(llama(), tmp_path / "copy")
    llama().save_pretrained(tmp_path / "float")
    with pytest.raises(ModelError, match="is not quantized"):
        import_model_from_safetensors(llama(), tmp_path / "float")
    with pytest.raises(UnsupportedOptionError, match="multi_device"):
        import_model_from_safetensors(llama(), saved, multi_device=True)


@pytest.mark.parametrize(
    ("folder", "change", "words"),
    [
        ("", lambda c: c.update(quant_method="gguf"), "quant_method"),
        ("", lambda c: c["global_quant_config"]["weight"].update(dtype="int1"), "dtype"),
        ("", lambda c: c["global_quant_config"].update(weight=7), "mapping"),
        ("", lambda c: c["export"].update(pack_method="zip"), "pack_method"),
        ("", lambda c: c["settings"].update(seed="x"), "settings"),
        ("compressed", lambda c: c["config_groups"]["group_0"].update(targets=["re:.*"]), "targets"),
        ("compressed", lambda c: c["config_groups"]["group_0"]["weights"].update(num_bits=99), "num_bits"),
        ("compressed", lambda c: c["config_groups"]["group_0"]["weights"].update(group_size=-1), "group_size"),
    ],
)
def test_configurations_that_cannot_be_read_are_refused(saved, tmp_path, folder, change, words):
    shutil.copytree(saved / folder, tmp_path / "copy")
    path = tmp_path / "copy/config.json"
    content = json.loads(path.read_text())
    change(content["quantization_config"])
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=words):
        import_model_from_safetensors(llama(), tmp_path / "copy")


def test_rotations_at_inference_and_low_rank_branches_are_saved(tmp_path):
    rotation = RotationConfig(r1=False, r4=True, rotation_size=32)
    for name, algorithm in (("rotated", rotation), ("branches", SVDQuantConfig(svd_rank=4, min_layer_size=32))):
        config = Config(LAYERS["mxfp4"], exclude=["lm_head"], algo_config=[algorithm])
        model = ModelQuantizer(config).quantize_model(llama(), token_ids())
        export_safetensors(model, tmp_path / name)
        stored = load_file(tmp_path / name / "model.safetensors")
        down = "model.layers.0.mlp.down_proj"
        if name == "rotated":
            assert (stored[f"{down}.input_rotation"].dtype, *stored[f"{down}.input_rotation"].shape) == (
                torch.int8,
                *(32, 32),
            )
        else:
            assert stored[f"{down}.low_rank_up"].shape == (64, 4)
        assert torch.equal(logits_of(import_model_from_safetensors(llama(), tmp_path / name)), logits_of(model))
        with pytest.raises(UnsupportedOptionError, match="turned inputs or a low-rank branch"):
            export_safetensors(model, tmp_path / "compressed", "compressed-tensors")
    spoil(tmp_path / "rotated", f"{down}.input_rotation", lambda x: x[:, :7].clone())
    with pytest.raises(ModelError, match="expected int8 of shape"):
        import_model_from_safetensors(llama(), tmp_path / "rotated")
    spoil(tmp_path / "rotated", f"{down}.input_rotation", lambda _: torch.ones(7, 7, dtype=torch.int8))
    with pytest.raises(ModelError, match="does not fit 96 inputs"):
        import_model_from_safetensors(llama(), tmp_path / "rotated")
