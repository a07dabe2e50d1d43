"""`quark quantize-llm` on a tiny model with a tokenizer of words."""

from __future__ import annotations

import json

import pytest
from commands import assert_one_line_error, run

torch = pytest.importorskip("torch")
folders = pytest.importorskip("quark.torch.language.folders")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

WORDS = [f"w{number}" for number in range(60)]
SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_hidden_layers": 1}
LLAMA = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("language")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **LLAMA)).save_pretrained(path / "float")
    known = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path / "float")
    order = torch.randint(0, 60, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    (path / "text.txt").write_text(" ".join(WORDS[number] for number in order))
    return path


def test_a_folder_is_quantized_and_evaluated(folder):
    out, text = folder / "int4", folder / "text.txt"
    options = ["--scheme", "w8a8_static", "--calib", text, "--samples", "4", "--length", "16", "--kv-cache", "int8"]
    options += ["--algorithm", "gptq"]
    result = run("quantize-llm", folder / "float", out, *options, "--evaluate", text, "--limit", "3", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["path"] == str(out)
    before, after = found["perplexity"]["float"], found["perplexity"]["quantized"]
    assert 40 < before < 100  # of 64 words at random
    assert 0 < abs(after / before - 1) < 0.05
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (out / "tokenizer.json").exists()


def test_onnx(folder, monkeypatch):
    """The model is quantized and handed to `export_onnx`; its own tests are tests/torch/language/test_language_onnx."""
    given = {}
    monkeypatch.setattr(folders, "export_onnx", lambda *arguments, **options: given.update({"": arguments} | options))
    out = folder / "onnx"
    out.mkdir()
    result = run("quantize-llm", folder / "float", out, "--scheme", "int4_wo_32", "--layout", "onnx", "--onnx-cache")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"written: {out}\n"
    model, place, ids = given.pop("")
    assert given == {"file_name": "model.onnx", "has_cache": True}
    assert place == out
    assert ids.shape == (1, 16)
    assert str(model.model.layers[0].mlp.up_proj).endswith("weight=int4)")
    assert (out / "tokenizer.json").exists()


def test_schemes_are_listed():
    result = run("quantize-llm", "any", "--list-schemes")
    assert result.exit_code == 0
    assert "int4_wo_64            int4 weights in groups of 64\n" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["float", "out", "--scheme", "int4_wo_65"], ["no scheme 'int4_wo_65'", "int4_wo_64"]),
        (["float", "float"], ["is the folder of the float model"]),
        (["none", "out"], ["expected a folder with config.json"]),
        (["float", "out", "--algorithm", "gptr"], ["no algorithm 'gptr'", "gptq"]),
        (["float", "out", "--scheme", "w8a8_static"], ["no data", "token ids"]),
        (["float", "out", "--algorithm", "gptq"], ["algorithm gptq needs calibration data", "--calib"]),
        (["float", "out", "--kv-cache", "int7"], ["no kv_cache_scheme 'int7'"]),
        (["float", "out", "--onnx-cache"], ["use the layout onnx"]),
        (["float", "out", "--calib", "none.txt"], ["none.txt", "cannot be read"]),
    ],
)
def test_mistakes(folder, arguments, words, monkeypatch):
    monkeypatch.chdir(folder)
    result = run("quantize-llm", *arguments)
    assert_one_line_error(result, *words)
