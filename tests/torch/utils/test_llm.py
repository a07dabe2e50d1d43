"""The flow of AMD Quark's script for language models, with its imports and calls as they are there."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from small_language_models import llama

from quark.common.profiler import GlobalProfiler, ProfileStep, profile_scope
from quark.errors import InvalidValueError, MissingDependencyError, UnknownNameError, UnsupportedOptionError
from quark.torch import (
    LLMTemplate,
    ModelQuantizer,
    RuntimeOptions,
    export_gguf,
    export_safetensors,
    import_model_from_safetensors,
)
from quark.torch.export.api import _move_quantizer_to_dict
from quark.torch.utils import TPDeviceManager, getattr_recursive, setattr_recursive
from quark.torch.utils.llm import (
    check_compatibility_before_quantization,
    get_calib_dataloader,
    get_model,
    get_tokenizer,
    prepare_for_moe_quant,
    preprocess_for_quantization,
    save_model,
    set_seed,
)

pytest.importorskip("transformers")
WORDS = "the quick brown fox jumps over a lazy dog and runs away from it"


class Tokenizer:
    """As much of a tokenizer as is asked for here: a word is a number."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [WORDS.split().index(each) for each in text.split()]}


def test_a_folder_is_quantized_exported_and_loaded(tmp_path: Path) -> None:
    save_model(llama(), None, tmp_path / "float")
    (tmp_path / "text").write_text(" ".join([WORDS] * 20))
    model, dtype = get_model(tmp_path / "float", "auto", "cpu", None, False, "eager", trust_remote_code=False)
    assert dtype == torch.float32
    assert check_compatibility_before_quantization(model, raise_on_error=True)
    loader = get_calib_dataloader(
        dataset_name=str(tmp_path / "text"),
        processor=None,
        tokenizer=Tokenizer(),
        batch_size=2,
        num_calib_data=4,
        seqlen=8,
        device="cpu",
    )
    assert [tuple(each.shape) for each in loader] == [(2, 8), (2, 8)]
    preprocess_for_quantization(model)
    prepare_for_moe_quant(model)
    config = LLMTemplate.get("llama").get_config(
        scheme="fp8", algorithm=None, kv_cache_scheme=None, layer_config={}, exclude_layers=None, algo_configs=None
    )
    config.keep_prequantized_layers = True
    quantizer = ModelQuantizer(config, False)
    model = quantizer.freeze(quantizer.quantize_model(model, loader), runtime_options=None)
    assert quantizer.config.exclude == ["lm_head"]
    export_safetensors(model, tmp_path / "out", "quark", weight_format="real_quantized", pack_method="reorder")
    ids = torch.arange(6)[None]
    loaded = import_model_from_safetensors(
        model=None,
        model_dir=tmp_path / "out",
        multi_device=False,
        trust_remote_code=False,
        attn_implementation="eager",
        device="cpu",
        multi_gpu=None,
    )
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_what_is_not_carried_out_says_so(tmp_path: Path) -> None:
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("fp8"), multi_device=True)
    with pytest.raises(UnsupportedOptionError, match="runtime_options"):
        quantizer.freeze(llama(), runtime_options=RuntimeOptions(native_linear_mode="fp8_per_tensor"))
    with pytest.raises(UnsupportedOptionError, match="quantize"):
        quantizer.freeze(llama(), False)
    with pytest.raises(UnsupportedOptionError, match="convert_hf_to_gguf"):
        export_gguf(llama(), output_dir=tmp_path, model_type="llama", tokenizer_path="")
    for call in (TPDeviceManager.tp_mesh_init, lambda: _move_quantizer_to_dict(llama())):
        with pytest.raises(UnsupportedOptionError, match="use_tp"):
            call()
    with pytest.raises(UnsupportedOptionError, match="multi_gpu"):
        import_model_from_safetensors(None, tmp_path, multi_gpu="auto")
    with pytest.raises(UnsupportedOptionError, match="f2f_weight_converters"):
        LLMTemplate("x", f2f_weight_converters=[1])
    with pytest.raises(UnknownNameError, match="awq_config"):
        LLMTemplate("x", awc_config=None)


def test_calibration_data_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean wikitext"):
        get_calib_dataloader("wikitex", tokenizer=Tokenizer())
    with pytest.raises(InvalidValueError, match="tokenizer"):
        get_calib_dataloader("wikitext")
    with pytest.raises(UnsupportedOptionError, match="processor"):
        get_calib_dataloader("wikitext", processor=object(), tokenizer=Tokenizer())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match="pip install datasets"):
        get_calib_dataloader("wikitext", tokenizer=Tokenizer())
    fake: Any = types.ModuleType("datasets")
    asked: list[tuple[Any, ...]] = []

    def load_dataset(*given: Any, split: str) -> list[dict[str, str]]:
        asked.append((*given, split))
        return [{"text": WORDS, "article": WORDS}] * 1000

    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    rows = list(get_calib_dataloader("pileval", tokenizer=Tokenizer(), num_calib_data=3, seqlen=5))
    assert [tuple(each.shape) for each in rows] == [(1, 5)] * 3
    assert asked == [("mit-han-lab/pile-val-backup", None, "validation")]


def test_perplexity_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from quark.contrib import llm_eval

    fake: Any = types.ModuleType("datasets")
    fake.load_dataset = lambda *_, split: {"text": [WORDS] * 4}
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr(llm_eval, "get_tokenizer", lambda _: Tokenizer())
    args = argparse.Namespace(model_dir="", num_eval_data=2, tasks=None)
    llm_eval.eval_model(args, llama(), "cpu", save_metrics_to_csv=True, output_dir=tmp_path / "metrics")
    assert "Perplexity: " in capsys.readouterr().out
    assert (tmp_path / "metrics/metrics.csv").read_text().startswith("metric,value")
    with pytest.raises(UnsupportedOptionError, match="tasks"):
        llm_eval.eval_model(argparse.Namespace(tasks="mmlu"), llama(), "cpu")


def test_steps_are_measured(tmp_path: Path) -> None:
    profiler = GlobalProfiler(output_path=tmp_path / "out" / "profile.yaml")
    before = len(profiler.steps)
    with profiler.scope(ProfileStep.MODEL_LOADING):
        assert GlobalProfiler() is profiler
    assert profile_scope(ProfileStep.USER_DEFINED, "mine")(lambda: 3)() == 3
    assert [name for name, _ in profiler.steps[before:]] == ["Model Loading", "mine"]
    assert "- step: 'mine'" in (tmp_path / "out" / "profile.yaml").read_text()
    with pytest.raises(InvalidValueError, match="user_msg"), profiler.scope(ProfileStep.USER_DEFINED):
        pass
    profiler.output_path = None


def test_small_helpers(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    setattr_recursive(model, "0.0", torch.nn.ReLU())
    assert isinstance(getattr_recursive(model, "0.0"), torch.nn.ReLU)
    assert not check_compatibility_before_quantization(model)
    set_seed(3)
    first = torch.rand(1)
    set_seed(3)
    assert torch.equal(first, torch.rand(1))
    with pytest.raises(OSError, match="nothing"):
        get_tokenizer(tmp_path / "nothing")
    with pytest.raises(UnknownNameError, match="Did you mean float16"):
        get_model(tmp_path, "float61")
