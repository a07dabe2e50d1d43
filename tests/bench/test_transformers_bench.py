"""The table of transformers: its configurations, the language model's jobs, and the judge of CIFAR-10."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from bench.child import OURS, ChildError
from bench.cifar_judge import NETWORKS, prepare
from bench.networks import Figure
from bench.record import Record
from bench.side_by_side import FLOAT
from bench.transformers import (
    AMD,
    CONFIGURATIONS,
    HEADER,
    LANGUAGE_CONFIGURATIONS,
    STRUCTURE,
    LanguageModel,
    is_chosen,
    main,
    update,
)
from onnx import TensorProto, helper, numpy_helper

from quark.onnx import get_default_config
from quark.onnx.quantization.config.options import settings_of


@pytest.mark.parametrize(
    "configuration", [configuration for configuration in CONFIGURATIONS if configuration.quantizer == OURS], ids=str
)
def test_options_of_ours_are_accepted(configuration: Any) -> None:
    config = get_default_config(configuration.preset)
    config.extra_options.update(configuration.extra_options)
    for name, value in configuration.settings.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    settings_of(config)


def test_no_two_rows_have_one_name() -> None:
    names = [(configuration.quantizer, configuration.label) for configuration in CONFIGURATIONS]
    assert len(set(names)) == len(names)
    labels = [configuration.label for configuration in LANGUAGE_CONFIGURATIONS]
    assert len(set(labels)) == len(labels)


def test_rows_are_chosen_by_quantizer_and_configuration() -> None:
    assert is_chosen(OURS, "MXINT8", None)
    assert is_chosen(OURS, "4 bits, GPTQ", ["nncf *", "ours *GPTQ"])
    assert not is_chosen(AMD, "4 bits, GPTQ", ["ours *GPTQ"])


def test_a_row_has_a_cell_for_every_heading(tmp_path: Path) -> None:
    record = Record.begin("transformers", Namespace(label="", output=tmp_path), HEADER)
    figure = Figure("net", "language", OURS, "W8A8", True, 4, {"perplexity": 20.5}, seconds=1.0, file_mb=2.0)
    failed = Figure("net", "language", AMD, "W8A8", True, 4, errors={"quantize": "no"})
    update(record, [figure, failed])
    row = dict(zip(HEADER, record.rows[0], strict=True))
    assert (row["measures"], row["file MB"], row["8-bit MACs %"]) == ("perplexity 20.5", "2.00", "")
    assert [blank.reason for blank in record.blanks] == ["quantize: no"]
    record.markdown()


class Runner:
    """Notes the job, in place of a process."""

    def __init__(self, answer: dict[str, Any] | None) -> None:
        self.answer = answer

    def run(self, who: str, script: str, job: dict[str, Any]) -> dict[str, Any]:
        self.who, self.job = who, job
        if self.answer is None:
            raise ChildError("no memory")
        return self.answer


def test_only_amd_quark_is_told_the_structure() -> None:
    model = LanguageModel(Path("llama"), Path("a.npy"), Path("b.npy"), samples=3, windows=2, device="cpu")
    answer = {"seconds": 2.0, "peak_mb": 100.0, "perplexity": 21.0, "save_error": "no disk"}
    configuration = next(
        configuration for configuration in LANGUAGE_CONFIGURATIONS if configuration.label.endswith("64, AWQ")
    )
    jobs = {}
    for who in (OURS, AMD):
        runner = Runner(answer)
        figure = model.measure(who, configuration, runner)
        assert (figure.measures, figure.seconds, figure.file_mb) == ({"perplexity": 21.0}, 2.0, None)
        assert figure.errors == {"save": "no disk"}
        jobs[who] = runner.job
    assert jobs[OURS]["algorithms"] == [("AWQConfig", {})]
    assert jobs[AMD]["algorithms"] == [("AWQConfig", STRUCTURE["AWQConfig"])]
    assert jobs[OURS]["layer"] == jobs[AMD]["layer"]
    assert jobs[OURS]["exclude"] == ["lm_head"]
    runner = Runner(answer)
    assert model.measure(FLOAT, None, runner).seconds is None
    assert (runner.who, runner.job["who"]) == (OURS, FLOAT)
    assert model.measure(OURS, configuration, Runner(None)).errors == {"quantize": "no memory"}


def test_perplexity_of_a_model_that_knows_nothing_is_its_vocabulary() -> None:
    torch = pytest.importorskip("torch")
    from bench.one_language import perplexity

    windows = np.arange(12, dtype=np.int64).reshape(3, 4) % 7
    assert perplexity(lambda ids: SimpleNamespace(logits=torch.zeros(*ids.shape, 7)), windows) == pytest.approx(7)
    # a model that is told the next token and gives it half of the probability
    half = float(np.log(6))

    def knowing(ids: Any) -> Any:
        logits = torch.zeros(*ids.shape, 7)
        logits[0, :-1].scatter_(1, ids[0, 1:, None], half)
        return SimpleNamespace(logits=logits)

    assert perplexity(knowing, windows) == pytest.approx(2)


def test_cifar_judge_counts_right_classes(tmp_path: Path) -> None:
    weight = np.zeros((3 * 32 * 32, 10), np.float32)
    weight[:, 3] = 1  # bright images are of class 3, dark ones of 0
    nodes = [helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("MatMul", ["f", "w"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "bright",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 32, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, tmp_path / "vit_cifar.onnx")
    images = np.zeros((4, 32, 32, 3), np.uint8)
    images[:2] = 255
    np.savez(
        tmp_path / "cifar10.npz", train_x=images, train_y=np.zeros(4), test_x=images, test_y=np.array([3, 3, 0, 5])
    )
    judge = NETWORKS["vit_cifar"](tmp_path)
    found = judge.evaluate(tmp_path / "vit_cifar.onnx")
    assert found == {"top1_percent": 75.0, "float_top1_percent": 75.0, "same_class": 1.0}
    assert [each["x"].shape for each in judge.calibration()] == [(1, 3, 32, 32)] * 4
    assert prepare(images[:1])[0, :, 0, 0] == pytest.approx([2.2489, 2.4286, 2.64], abs=1e-3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--zoo DIR"),
        (["--zoo", "."], "--judge"),
        (["--language", "nowhere"], "--language nowhere: no config.json"),
    ],
)
def test_what_is_missing_is_said(given: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["transformers", *given])
    with pytest.raises(SystemExit, match=message):
        main()
