"""From a folder to a folder, layer by layer, with resuming."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from small_language_models import FP8, LAYERS, kv_cache, llama, logits_of, quantizer, token_ids

from quark.errors import InvalidValueError, ModelError, UnsupportedOptionError
from quark.torch import ModelQuantizer, import_model_from_safetensors
from quark.torch.language import pipeline, streaming
from quark.torch.quantization.config.config import Config, GPTQConfig

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    llama(layers=3).save_pretrained(folder / "plain", max_shard_size="60KB")
    llama(layers=3, is_tied=True).save_pretrained(folder / "tied")
    (folder / "plain/tokenizer.json").write_text("{}")
    return folder


def content(folder):
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


@pytest.mark.parametrize(
    ("kind", "name", "layout", "exclude"),
    [
        ("plain", "int8 static", "compressed-tensors", ["lm_head"]),
        ("tied", "uint4 groups", "quark", ["lm_head"]),
        ("tied", "uint4 groups", "quark", []),
    ],
)
def test_a_streamed_model_is_the_one_that_was_quantized_in_memory(source, tmp_path, kind, name, layout, exclude):
    model = quantizer(name, exclude).quantize_model(llama(layers=3, is_tied=kind == "tied"), token_ids())
    assert os.path.exists(source / "plain/model.safetensors.index.json")
    for _ in range(2):  # also over a model that is there
        quantizer(name, exclude).direct_quantize_checkpoint(
            source / kind, tmp_path / "out", dataloader=token_ids(), custom_mode=layout
        )
        assert os.listdir(tmp_path) == ["out"]
        loaded = import_model_from_safetensors(llama(layers=3, is_tied=kind == "tied"), tmp_path / "out")
        assert torch.equal(logits_of(loaded), logits_of(model))
    files = content(tmp_path / "out")
    assert ("tokenizer.json" in files) == (kind == "plain")
    assert json.loads(files["config.json"])["tie_word_embeddings"] == (kind == "tied" and bool(exclude))


def test_no_more_than_a_layer_is_in_memory(source, tmp_path, monkeypatch):
    """Numbers of a layer are there while it is quantized, and those of no other layer."""
    counts = []
    original = pipeline.quantize_layer

    def watch(work):
        weights = [p for n, p in work.model.named_parameters() if ".layers." in n and p.device.type != "meta"]
        counts.append(sum(weight.numel() for weight in weights))
        return original(work)

    monkeypatch.setattr(streaming, "quantize_layer", watch)
    quantizer("int4 groups").direct_quantize_checkpoint(source / "plain", tmp_path / "out", dataloader=token_ids())
    one = sum(parameter.numel() for parameter in llama().get_submodule("model.layers.0").parameters())
    assert counts == [one, one, one, 0]


@pytest.mark.parametrize("place", [2, 4])
def test_a_run_that_was_killed_goes_on_and_gives_the_same_bytes(source, tmp_path, monkeypatch, place):
    options = {"kv_cache_quant_config": kv_cache(FP8, LAYERS["fp8"]), "kv_cache_post_rope": True}

    def run(folder):
        quantizer("fp8", **options).direct_quantize_checkpoint(
            source / "plain", tmp_path / folder, dataloader=token_ids(), custom_mode="compressed-tensors"
        )

    run("whole")
    done: list[str] = []
    original = pipeline.quantize_layer

    def killed(work):
        if len(done) == place - 1:
            raise KeyboardInterrupt
        done.append(work.path)
        return original(work)

    monkeypatch.setattr(streaming, "quantize_layer", killed)
    with pytest.raises(KeyboardInterrupt):
        run("resumed")
    assert not (tmp_path / "resumed").exists()
    resumed = []

    def watch(work):
        resumed.append(work.path)
        return original(work)

    monkeypatch.setattr(streaming, "quantize_layer", watch)
    run("resumed")
    assert done + resumed == ["model.layers.0", "model.layers.1", "model.layers.2", ""]
    assert content(tmp_path / "resumed") == content(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["resumed", "whole"]


def test_other_data_or_settings_start_from_the_first_layer(source, tmp_path, monkeypatch):
    original = pipeline.quantize_layer
    seen = []

    def killed(work):
        seen.append(work.path)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return original(work)

    monkeypatch.setattr(streaming, "quantize_layer", killed)
    with pytest.raises(KeyboardInterrupt):
        quantizer("int8 static").direct_quantize_checkpoint(source / "plain", tmp_path / "out", dataloader=token_ids())
    quantizer("int8 static").direct_quantize_checkpoint(source / "plain", tmp_path / "out", dataloader=token_ids(3))
    assert seen[3] == "model.layers.0"


def test_what_cannot_be_streamed_is_refused(source, tmp_path):
    plain = quantizer("int4 groups")
    with pytest.raises(InvalidValueError, match="the folder that is read"):
        plain.direct_quantize_checkpoint(source / "plain", source / "plain")
    with pytest.raises(InvalidValueError, match="expected a folder"):
        plain.direct_quantize_checkpoint(tmp_path / "none", tmp_path / "out")
    with pytest.raises(InvalidValueError, match="static scale"):
        quantizer("int8 static").direct_quantize_checkpoint(source / "plain", tmp_path / "out")
    for option, value in (("weight_converters", [1]), ("device", ["cpu", "cpu"]), ("presharded_weights", {})):
        with pytest.raises(UnsupportedOptionError, match=option):
            plain.direct_quantize_checkpoint(source / "plain", tmp_path / "out", **{option: value})
    plain.direct_quantize_checkpoint(source / "plain", tmp_path / "done")
    with pytest.raises(ModelError, match="quantized already"):
        plain.direct_quantize_checkpoint(tmp_path / "done", tmp_path / "again")
    shutil.copytree(source / "tied", tmp_path / "other")
    config = json.loads((tmp_path / "other/config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ModelError, match="has no tensor 'model.layers.3"):
        plain.direct_quantize_checkpoint(tmp_path / "other", tmp_path / "out")
    (tmp_path / "other/config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    with pytest.raises(ModelError, match="expected float of shape"):
        plain.direct_quantize_checkpoint(tmp_path / "other", tmp_path / "out")
    (tmp_path / "other/config.json").write_text(json.dumps({"model_type": "nothing known"}))
    with pytest.raises(ModelError, match="not a model that transformers knows"):
        plain.direct_quantize_checkpoint(tmp_path / "other", tmp_path / "out")


def test_algorithms_see_the_float_network_too(source, tmp_path, monkeypatch):
    """GPTQ follows the float network, whose hidden states are kept for resuming as well."""
    config = Config(LAYERS["int4 groups"], exclude=["lm_head"], algo_config=[GPTQConfig()])
    original = pipeline.quantize_layer
    calls = []

    def killed(work):
        calls.append(work.path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(work)

    model = ModelQuantizer(config).quantize_model(llama(layers=3), token_ids())
    monkeypatch.setattr(streaming, "quantize_layer", killed)
    with pytest.raises(KeyboardInterrupt):
        ModelQuantizer(config).direct_quantize_checkpoint(source / "plain", tmp_path / "out", dataloader=token_ids())
    ModelQuantizer(config).direct_quantize_checkpoint(source / "plain", tmp_path / "out", dataloader=token_ids())
    loaded = import_model_from_safetensors(llama(layers=3), tmp_path / "out")
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=0, atol=1e-5)
