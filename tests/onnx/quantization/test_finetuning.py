"""Finetuning from end to end: closer to the float network or as it was, the same every time, and resumable."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from walked_networks import residual

import quark.features.compensation.on_onnx as compensation
import quark.features.finetuning.fit as fitting
import quark.onnx.deciding as deciding
from quark.compare.improvement import OutputErrors
from quark.errors import InvalidValueError, ModelError
from quark.features.finetuning.checkpoint import Checkpoint
from quark.features.finetuning.problem import Fitted
from quark.onnx import ModelQuantizer, get_default_config, quantize
from quark.onnx.comparing import output_errors
from quark.onnx.session import open_session

SAMPLES = [np.random.default_rng(seed).standard_normal((1, 3, 6, 6)).astype(np.float32) for seed in range(24)]


def config(preset: str = "MXFP4E2M1_ADAQUANT", **finetune: Any) -> Any:
    found = get_default_config(preset)
    found.extra_options["FastFinetune"].update({"NumIterations": 30, "BatchSize": 1, **finetune})
    found.print_summary = False
    return found


def facts_of(result: Any, name: str = "AdaQuant") -> Any:
    return next(algorithm for algorithm in result.report.algorithms if algorithm.name == name)


def error_of(network: onnx.ModelProto, result: Any) -> float:
    """The squared error of the outputs on all samples, means included."""
    reference, quantized = open_session(network), open_session(result.model)
    pairs = ((reference.run(None, {"x": x})[0], quantized.run(None, {"x": x})[0]) for x in SAMPLES)
    return float(sum(np.square(expected - found).sum() for expected, found in pairs))


def weights(model: onnx.ModelProto) -> dict[str, bytes]:
    return {each.name: each.SerializeToString() for each in model.graph.initializer}


@pytest.fixture(scope="module")
def network() -> onnx.ModelProto:
    return residual()


@pytest.mark.parametrize("preset", ["MXFP4E2M1_ADAQUANT", "MX4_ADAQUANT", "XINT8_ADAQUANT", "A8W8_ADAROUND"])
def test_the_network_is_no_further_from_float_than_without(network: onnx.ModelProto, preset: str) -> None:
    plain = quantize(network, SAMPLES, config(preset, NumIterations=0))
    tuned = quantize(network, SAMPLES, config(preset, NumIterations=100, LearningRate="auto"))
    # the output counts as scores of classes, so divergence decides, and a little SQNR may be lost for it
    assert tuned.report.outputs[0].sqnr_db >= plain.report.outputs[0].sqnr_db - 0.5
    name = "AdaRound" if "ADAROUND" in preset else "AdaQuant"
    assert not facts_of(plain, name).changed


@pytest.mark.parametrize("preset", ["MXFP4E2M1_ADAQUANT", "XINT8_ADAROUND"])
def test_compensated_weights_are_trained_as_others_are(
    network: onnx.ModelProto, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of a format are their own neighbours, and rounding them changes nothing: nothing would be learned."""
    monkeypatch.setattr(compensation, "_final_errors", lambda _: OutputErrors())  # not taken back
    compensated, plain = config(preset, NumIterations=100), config(preset, NumIterations=100)
    compensated.extra_options["Compensation"], plain.extra_options["Compensation"] = True, False
    tuned, untuned = (quantize(network, SAMPLES, value) for value in (compensated, plain))
    found, expected = tuned.report, untuned.report
    facts = {algorithm.name: algorithm for algorithm in found.algorithms}
    assert facts["compensation"].changed
    name = "AdaRound" if "ADAROUND" in preset else "AdaQuant"
    assert len(facts[name].changed) >= len(
        next(algorithm for algorithm in expected.algorithms if algorithm.name == name).changed
    )
    assert error_of(network, tuned) < 1.25 * error_of(network, untuned)


def test_four_bits_come_closer(network: onnx.ModelProto) -> None:
    plain = quantize(network, SAMPLES, config(NumIterations=0))
    tuned = quantize(network, SAMPLES, config(NumIterations=200))
    assert error_of(network, tuned) < 0.97 * error_of(network, plain)
    assert len(facts_of(tuned).changed) >= 4


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(network: onnx.ModelProto) -> None:
    first, again, other = (
        quantize(network, SAMPLES, config(FixedSeed=seed)).model.SerializeToString() for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_an_interrupted_run_goes_on_and_ends_in_the_same_bytes(
    network: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = quantize(network, SAMPLES, config()).model.SerializeToString()
    done: list[str] = []
    fit = fitting.fit

    def until_the_fourth(problem: Any, options: Any) -> Fitted:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(problem.name)
        return fit(problem, options)

    monkeypatch.setattr(fitting, "fit", until_the_fourth)
    target = tmp_path / "out.onnx"
    with pytest.raises(KeyboardInterrupt), caplog.at_level(logging.WARNING, "quark"):
        ModelQuantizer(config()).quantize_model(network, target, SAMPLES)
    assert "run the same again" in caplog.text
    assert list(tmp_path.iterdir()) == []
    fitted_again: list[str] = []

    def counted(problem: Any, options: Any) -> Fitted:
        fitted_again.append(problem.name)
        return fit(problem, options)

    monkeypatch.setattr(fitting, "fit", counted)
    assert quantize(network, SAMPLES, config()).model.SerializeToString() == whole
    assert len(fitted_again) == 3
    assert not set(fitted_again) & set(done)


def test_a_folder_of_the_user_keeps_the_layers(
    network: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = quantize(network, SAMPLES, config(CacheDir=str(tmp_path))).model.SerializeToString()
    files = sorted(tmp_path.glob("*/*.npz"))
    assert len(files) == 6

    def refuse(problem: Any, options: Any) -> Fitted:
        raise AssertionError(problem.name)

    monkeypatch.setattr(fitting, "fit", refuse)
    assert quantize(network, SAMPLES, config(CacheDir=str(tmp_path))).model.SerializeToString() == first


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"\x80\x04K\x01."])
def test_a_broken_file_is_fitted_anew(
    network: onnx.ModelProto, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    first = quantize(network, SAMPLES, config(CacheDir=str(tmp_path))).model.SerializeToString()
    sorted(tmp_path.glob("*/*.npz"))[2].write_bytes(content)
    with caplog.at_level(logging.WARNING, "quark"):
        assert quantize(network, SAMPLES, config(CacheDir=str(tmp_path))).model.SerializeToString() == first
    assert "0002.npz is ignored" in caplog.text


def test_other_data_are_another_run(tmp_path: Path) -> None:
    first, second = (Checkpoint(tmp_path, facts).folder for facts in (["a"], ["b"]))
    assert first != second


def test_a_folder_that_cannot_be_made_is_a_warning(
    network: onnx.ModelProto, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "quark"):
        quantize(network, SAMPLES, config(CacheDir=str(tmp_path / "file")))
    assert "layers are not kept" in caplog.text


def test_layers_that_make_the_network_worse_are_left_where_asked(network: onnx.ModelProto) -> None:
    chosen = quantize(network, SAMPLES, config(SelectiveUpdate=True, LearningRate=0.3, NumIterations=20))
    found = facts_of(chosen)
    assert len(found.changed) + len(found.left) == 6
    plain = quantize(network, SAMPLES, config(NumIterations=0))
    assert chosen.report.outputs[0].sqnr_db >= plain.report.outputs[0].sqnr_db - 0.01


def test_a_network_that_got_worse_is_taken_back_as_a_whole(
    network: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(problem: Any, options: Any) -> Fitted:
        return Fitted(problem.weight + 5, problem.bias, 1.0, 0.5, 1, 0.1)

    plain = quantize(network, SAMPLES, config(NumIterations=0))
    monkeypatch.setattr(fitting, "fit", spoil)
    spoilt = quantize(network, SAMPLES, config())
    assert weights(spoilt.model) == weights(plain.model)
    assert not facts_of(spoilt).changed
    assert "got worse" in facts_of(spoilt).left[-1].reason


def test_layers_up_to_where_the_network_got_worse_are_kept(
    network: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit, done = fitting.fit, []

    def spoil_the_last(problem: Any, options: Any) -> Fitted:
        done.append(problem.name)
        if len(done) < 6:
            return fit(problem, options)
        return Fitted(-problem.weight, problem.bias, 1.0, 0.5, 1, 0.1)

    monkeypatch.setattr(fitting, "fit", spoil_the_last)
    found = quantize(network, SAMPLES, config(NumIterations=200))
    plain = quantize(network, SAMPLES, config(NumIterations=0))
    assert 0 < len(facts_of(found).changed) < 6
    assert found.report.outputs[0].sqnr_db > plain.report.outputs[0].sqnr_db


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_few_samples_are_enough(network: onnx.ModelProto, samples: int) -> None:
    found = quantize(network, SAMPLES[:samples], config(DataSize=1000))
    assert len(facts_of(found).changed) + len(facts_of(found).left) == 6


@pytest.mark.parametrize(
    "settings",
    [
        {"DropRatio": 0.5},
        {"DropRatio": 0.0},
        {"OutputQDQ": True},
        {"MemOptLevel": 2},
        {"MemOptLevel": 0},
        {"NumBatches": 3},
        {"NumBatches": -1},
        {"UpdateBias": False},
        {"LRAdjust": (0.001, 0.01)},
        {"OptimAlgorithm": "adaround", "LearningRate": 0.1},
        {"TargetOpType": ["Gemm"]},
        {"EarlyStop": True, "NumIterations": 400},
    ],
    ids=str,
)
def test_what_the_settings_change(network: onnx.ModelProto, settings: dict[str, Any]) -> None:
    usual = weights(quantize(network, SAMPLES, config(EarlyStop=False)).model)
    found = weights(quantize(network, SAMPLES, config(**{"EarlyStop": False, **settings})).model)
    is_only_memory = "MemOptLevel" in settings
    assert (found == usual) is is_only_memory


def test_it_runs_on_random_numbers_if_asked_to(network: onnx.ModelProto) -> None:
    found = quantize(network, None, config(NumIterations=5), use_random_data=True)
    assert any("random numbers" in remark for remark in found.report.remarks)


def test_layers_in_parallel_know_nothing_of_each_other(network: onnx.ModelProto) -> None:
    """The first layer sees the same either way, the last one does not."""
    one_by_one, parallel = (quantize(network, SAMPLES, config(Parallel=value)) for value in (False, True))
    first, last = ([facts_of(value).changed[number] for value in (one_by_one, parallel)] for number in (0, -1))
    assert first[0] == first[1]
    assert last[0] != last[1]


def test_only_the_largest_layer(network: onnx.ModelProto) -> None:
    facts = facts_of(quantize(network, SAMPLES, config(SelectMaxMemLayer=True)))
    reasons = [each.reason for each in facts.left]
    assert len(facts.changed) == 1
    assert len(reasons) == 5
    assert all("takes the most memory" in reason for reason in reasons)


def test_the_reference_is_the_network_of_another_file(network: onnx.ModelProto, tmp_path: Path) -> None:
    """Weights are fitted to those of a network with doubled ones in its last layer; the held-out error tells."""
    doubled = onnx.ModelProto()
    doubled.CopyFrom(network)
    names = [each.input[1] for each in doubled.graph.node if each.op_type in ("Conv", "Gemm", "MatMul")]
    weight = next(each for each in doubled.graph.initializer if each.name == names[-1])
    array = onnx.numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.numpy_helper.from_array(1.5 * array, weight.name))
    onnx.save(doubled, tmp_path / "doubled.onnx")
    onnx.save(network, tmp_path / "same.onnx")
    usual, same, other = (
        quantize(network, SAMPLES, config(**settings))
        for settings in ({}, *({"RefModelPath": str(tmp_path / f"{name}.onnx")} for name in ("same", "doubled")))
    )
    assert weights(usual.model) == weights(same.model)
    assert weights(usual.model) != weights(other.model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"OutputIndex": 3}, "OutputIndex 3: the model has 1 outputs"), ({"RefModelPath": "no.onnx"}, "no such file")],
)
def test_what_there_is_not_is_an_error(network: onnx.ModelProto, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        quantize(network, SAMPLES, config(**settings))


def test_a_reference_with_other_layers_is_an_error(network: onnx.ModelProto, tmp_path: Path) -> None:
    other = onnx.ModelProto()
    other.CopyFrom(network)
    next(each for each in other.graph.node if each.op_type == "Conv").name = "elsewhere"
    onnx.save(other, tmp_path / "other.onnx")
    with pytest.raises(ModelError, match=r"RefModelPath .*other.onnx': it has no Conv"):
        quantize(network, SAMPLES, config(RefModelPath=str(tmp_path / "other.onnx")))


def test_the_network_is_judged_by_one_output_if_asked_for(
    network: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = onnx.ModelProto()
    two.CopyFrom(network)
    inner = next(each.output[0] for each in two.graph.node if each.op_type == "Conv")
    two.graph.output.add(name=inner).type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    judged: list[Any] = []
    errors = output_errors

    def seen(model: Any, samples: Any, expected: Any, outputs: Any = None, **settings: Any) -> OutputErrors:
        judged.append(outputs)
        return errors(model, samples, expected, outputs, **settings)

    monkeypatch.setattr(deciding, "output_errors", seen)
    for index, expected in ((None, None), (0, [network.graph.output[0].name]), (1, [inner])):
        judged.clear()
        settings = config(OutputIndex=index, NumIterations=1)
        settings.extra_options["Compensation"] = False  # is judged by all outputs
        quantize(two, SAMPLES, settings)
        assert judged
        assert all(each == expected for each in judged)
