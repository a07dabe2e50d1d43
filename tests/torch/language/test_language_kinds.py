"""Kinds of models beside Llama, settings and data that do not fit them, and folders in a bad state."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace

import pytest
import torch
from small_language_models import LAYERS, VOCABULARY, llama, logits_of, quantizer, token_ids
from torch import nn

from quark.errors import InvalidValueError, ModelError, OutputError, QuarkError, UnsupportedOptionError
from quark.torch import ModelQuantizer, import_model_from_safetensors
from quark.torch.export.language import LanguageModel
from quark.torch.language import streaming
from quark.torch.language.folders import LanguageQuantization, load_model, quantize_folder
from quark.torch.language.linear import QuantizedLinear
from quark.torch.language.texts import perplexity
from quark.torch.quantization.config.config import Config, GPTQConfig

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def made(kind, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def experts():
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    return made("Qwen2Moe", num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, pad_token_id=0, **sizes)


def test_the_linear_layers_of_falcon_are_a_class_of_their_own():
    model = made("Falcon")
    expected = logits_of(model)
    quantizer("int8 channels").quantize_model(model)
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 4
    assert float((logits_of(model) - expected).norm() / expected.norm()) < 0.02


def test_what_is_compared_with_onnx_is_what_the_layer_returned():
    """Falcon adds to the result of a layer in place."""
    model = made("Falcon")
    name = "transformer.h.0.mlp.dense_4h_to_h"
    returned = []
    model.get_submodule(name).register_forward_hook(lambda _m, _args, out: returned.append(out.clone().numpy()))
    language = LanguageModel(model)
    found = language.record(language.example(token_ids()[0]), [f"{name}.output"])
    assert (found[f"{name}.output"] == returned[0]).all()


def test_weights_that_stay_in_float_are_told(caplog):
    with caplog.at_level(logging.WARNING):
        quantizer("int8 channels").quantize_model(llama(layers=1))
        assert not caplog.records
        quantizer("int8 channels", ["lmhead"]).quantize_model(experts())
    told = [record.getMessage() for record in caplog.records]
    assert "exclude 'lmhead' matches no linear layer" in told[0]
    assert "'model.layers.0.mlp.experts' (Qwen2MoeExperts)" in told[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_quant_config": {"*down_prj": LAYERS["int4 groups"]}}, "no linear layer .*down_prj"),
        ({"layer_type_quant_config": {nn.Embedding: LAYERS["int4 groups"]}}, "Embedding"),
        ({"exclude": ["*"]}, "no linear layer of LlamaForCausalLM is to be quantized"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings, message):
    model = llama(layers=1)
    with pytest.raises(QuarkError, match=message):
        ModelQuantizer(Config(LAYERS["int8 channels"], algo_config=[], **settings)).quantize_model(model)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


def test_a_head_that_something_lies_in_front_of():
    model = made("OPT", ffn_dim=64, word_embed_proj_dim=16, do_layer_norm_before=False)
    with pytest.raises(UnsupportedOptionError, match="'lm_head' reads 16 channels and the layers return 32"):
        quantizer("int8 static", []).quantize_model(model, token_ids())
    quantizer("int8 static").quantize_model(model, token_ids())


def test_a_model_is_quantized_once_and_has_numbers():
    model = quantizer("int8 channels").quantize_model(llama(layers=1))
    with pytest.raises(InvalidValueError, match=r"'model\.layers\.0\.self_attn\.q_proj' is quantized already"):
        quantizer("int4 groups").quantize_model(model)
    for name in ("fp8 e5m2", "mxfp6", "int4 groups"):
        broken = llama(layers=1)
        broken.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("inf")
        with pytest.raises(ModelError, match=r"'model\.layers\.0\.mlp\.up_proj' has NaN or Inf"):
            quantizer(name).quantize_model(broken)


def test_data():
    ids = token_ids()[0]
    one = {"input_ids": ids, "use_cache": True}
    expected = logits_of(quantizer("int8 static").quantize_model(llama(layers=1), [ids]))
    assert torch.equal(logits_of(quantizer("int8 static").quantize_model(llama(layers=1), one)), expected)
    with pytest.raises(InvalidValueError, match="is a int"):
        quantizer("int8 static").quantize_model(llama(layers=1), 5)
    with pytest.raises(InvalidValueError, match="batch 1 .* leaves out all"):
        quantizer("int8 static").quantize_model(llama(layers=1), [{**one, "attention_mask": torch.zeros_like(ids)}])
    with pytest.raises(ModelError, match=r"12 tokens up to .* beyond those of the model"):
        perplexity(llama(layers=1), [ids + VOCABULARY])


# ---- folders
@pytest.fixture
def folder(tmp_path):
    llama(layers=2).save_pretrained(tmp_path / "in")
    return tmp_path / "in"


def test_names_that_transformers_translates(tmp_path):
    """Experts are one tensor for all in the model, and a tensor for each in the folder."""
    experts().save_pretrained(tmp_path / "in")
    with pytest.raises(ModelError, match="quantize_model and export_safetensors do"):
        quantizer("int8 channels").direct_quantize_checkpoint(tmp_path / "in", tmp_path / "out")
    quantize_folder(LanguageQuantization(tmp_path / "in", tmp_path / "out", "int8_wo"))
    loaded = import_model_from_safetensors(experts(), tmp_path / "out")
    assert torch.equal(logits_of(loaded), logits_of(quantizer("int8 channels").quantize_model(experts())))


def test_bad_folders(folder):
    request = LanguageQuantization(folder, folder.parent / "out", "int8_wo")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"has no tensor 'model\.layers\.2"):  # and no random numbers for it
        load_model(folder)
    for wrong in ({"hidden_size": "x"}, {"num_attention_heads": 0}, {"dtype": "nonsense"}):
        (folder / "config.json").write_text(json.dumps({**config, **wrong}))
        with pytest.raises(ModelError, match="not a model that transformers knows"):
            quantize_folder(request)
    (folder.parent / "file").touch()
    with pytest.raises(OutputError, match="is a file"):
        quantize_folder(replace(request, output=folder.parent / "file"))
    assert sorted(os.listdir(folder.parent)) == ["file", "in"]


def test_what_a_layout_does_not_hold_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "quantize_layer", lambda work: pytest.fail("begun"))
    llama(layers=1).save_pretrained(tmp_path / "in")
    with pytest.raises(UnsupportedOptionError, match=r"'model\.layers\.0\.mlp\.down_proj': int4 .* 96 inputs"):
        quantize_folder(LanguageQuantization(tmp_path / "in", tmp_path / "out", "int4_wo_64"))
    with pytest.raises(InvalidValueError, match="static scale"):
        quantize_folder(LanguageQuantization(tmp_path / "in", tmp_path / "out", "w8a8_static"))
    assert os.listdir(tmp_path) == ["in"]


def test_the_named_list_of_layers_is_taken_in_folders_too(folder):
    config = Config(LAYERS["int4 groups"], algo_config=[GPTQConfig(model_decoder_layers="model.nothing")])
    with pytest.raises(ModelError, match=r"model_decoder_layers 'model\.nothing'"):
        ModelQuantizer(config).direct_quantize_checkpoint(folder, folder.parent / "out", dataloader=token_ids())


def killed_behind(place, monkeypatch, run):
    original = streaming._Run._note

    def note(self):
        original(self)
        if self.done == place:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(streaming._Run, "_note", note)
        with pytest.raises(KeyboardInterrupt):
            run()


def test_killed_behind_the_head_and_with_other_files_in_the_folder(folder, monkeypatch):
    out, work = folder.parent / "out", folder.parent / "out.quark-work"

    def run():
        quantizer("int8 static", []).direct_quantize_checkpoint(folder, out, dataloader=token_ids())

    killed_behind(3, monkeypatch, run)
    (work / "junk.txt").touch()
    (work / "sub").mkdir()
    run()
    assert not work.exists()
    assert not {"junk.txt", "sub"} & set(os.listdir(out))
    killed_behind(1, monkeypatch, run)
    next(work.glob("model-*")).write_bytes(b"x")
    with pytest.raises(ModelError, match="remove '.*quark-work' to start from the first layer"):
        run()
    (work / "state.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON.*remove '.*quark-work'"):
        run()
