"""The training loop: it learns, keeps the best, goes on where it was stopped, and stops when it should."""

import copy
import pickle

import pytest
import torch
from tiny_training import (
    CLASSES,
    SIZE,
    state_differences,
    tiny_data,
    tiny_network,
    tiny_options,
    tiny_quantized_network,
)
from torch import nn

from quark.errors import InvalidValueError, QuarkError
from quark.torch import ModelQuantizer
from quark.vision.tensor_file import load_checkpoint, save_checkpoint
from quark.vision.training import (
    Autocast,
    DivergedError,
    OptimizerName,
    Trainer,
    TrainingOptions,
    choose_device,
    evaluate_module,
)

QUICK = tiny_options(epochs=4, learning_rate=0.1, seed=3)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(folder, options=QUICK, model=None, teacher=None, **arguments):
    model = tiny_network() if model is None else model
    result = Trainer(model, options, folder, teacher=teacher).train(*tiny_data(), **arguments)
    return model, result


@pytest.mark.parametrize(
    "options",
    [
        QUICK,
        tiny_options(epochs=4, learning_rate=0.02, optimizer=OptimizerName.ADAM, label_smoothing=0.1, clip_norm=5.0),
        tiny_options(epochs=4, learning_rate=0.1, autocast=Autocast.BFLOAT16, average_decay=0.8),
    ],
    ids=["sgd", "adam", "bfloat16"],
)
def test_it_learns_and_leaves_the_best_in_the_model(tmp_path, options):
    model, result = trained(tmp_path, options)
    assert result.history[0].top1 < 0.6 < 0.9 < result.best.top1
    assert [each.epoch for each in result.history] == [0, 1, 2, 3, 4]
    assert result.history[-1].loss < result.history[1].loss
    assert not model.training
    assert evaluate_module(model, tiny_data()[1]).accuracy.top1 == result.best.top1
    assert state_differences(load_checkpoint(tmp_path / "best.pt")["model"], model.state_dict()) == []


@pytest.mark.parametrize("average_decay", [None, 0.9])
@pytest.mark.parametrize("made", [tiny_network, tiny_quantized_network])
def test_a_resumed_run_ends_bit_for_bit_where_an_uninterrupted_one_does(tmp_path, average_decay, made):
    options = tiny_options(epochs=4, learning_rate=0.05, average_decay=average_decay, clip_norm=1.0, seed=3)
    whole, expected = trained(tmp_path / "whole", options, made())

    class StoppedError(Exception):
        pass

    def stop(result):
        if result.epoch == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        Trainer(made(), options, tmp_path / "parts", report=stop).train(*tiny_data())
    torch.manual_seed(99)  # another process would begin anywhere
    resumed, result = trained(tmp_path / "parts", options, made(seed=7), resumes=True)
    assert state_differences(whole.state_dict(), resumed.state_dict()) == []
    ends = [load_checkpoint(tmp_path / part / "last.pt") for part in ("whole", "parts")]
    assert state_differences(ends[0]["model"], ends[1]["model"]) == []
    assert [(each.top1, each.loss) for each in result.history] == [
        (result.top1, result.loss) for result in expected.history
    ]


def test_resuming_what_is_not_there_or_is_another_run_is_an_error(tmp_path):
    with pytest.raises(InvalidValueError, match=r"last\.pt'.*no such file"):
        trained(tmp_path, resumes=True)
    trained(tmp_path, tiny_options(epochs=1, learning_rate=0.1))
    with pytest.raises(InvalidValueError, match=r"learning_rate 0\.1, not 0\.2"):
        trained(tmp_path, tiny_options(epochs=1, learning_rate=0.2), resumes=True)
    with pytest.raises(InvalidValueError, match="another network"):
        trained(tmp_path, tiny_options(epochs=1, learning_rate=0.1), tiny_network(has_batch_norm=False), resumes=True)
    (tmp_path / "last.pt").write_bytes(b"half a file")
    with pytest.raises(InvalidValueError, match="cannot be read"):
        trained(tmp_path, tiny_options(epochs=1, learning_rate=0.1), resumes=True)


def test_the_network_as_it_came_is_the_best_where_training_ruins_it(tmp_path):
    model, _ = trained(tmp_path / "first")
    before = copy.deepcopy(model.state_dict())
    options = tiny_options(epochs=6, learning_rate=300.0, warmup=0.0, patience=2)
    _, result = trained(tmp_path / "second", options, model)
    assert result.best.epoch == 0
    assert len(result.history) == 3
    assert result.is_stopped_early
    assert state_differences(before, model.state_dict()) == []


class GoesNan(nn.Module):
    """Trains for a while, then its scores are no numbers."""

    def __init__(self, steps):
        super().__init__()
        self.inner, self.steps = tiny_network(), steps

    def forward(self, x):
        self.steps -= self.training
        return self.inner(x) * (float("nan") if self.steps < 0 else 1.0)


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_best(tmp_path):
    model = GoesNan(steps=6 + 3)  # six steps in an epoch
    with pytest.raises(DivergedError, match=r"epoch 2, step 4\..*top-1 \d.*best\.pt'.*learning rate \(it was 0\.1\)"):
        trained(tmp_path, model=model)
    assert all(torch.isfinite(each).all() for each in model.state_dict().values())
    best = load_checkpoint(tmp_path / "best.pt")
    assert best["epoch"] == 1
    assert state_differences(best["model"], model.state_dict()) == []
    assert load_checkpoint(tmp_path / "last.pt")["history"][-1]["epoch"] == 1
    assert issubclass(DivergedError, QuarkError)


def test_a_quantized_network_learns_its_thresholds_too(tmp_path):
    model = tiny_quantized_network()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    options = tiny_options(epochs=6, learning_rate=0.1, average_decay=0.9, batch_norm_share=0.7)
    _, result = trained(tmp_path, options, model)
    assert result.best.top1 > 0.9
    moved = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    assert any(name.endswith("log2_threshold") for name in moved)
    held_out = tiny_data()[1]
    frozen = ModelQuantizer.freeze(model)
    assert evaluate_module(frozen, held_out).agreement(evaluate_module(model, held_out)) == 1.0


def test_frozen_batch_norms_keep_their_statistics(tmp_path):
    seen = []
    model = tiny_network()
    norm = model[1]
    options = tiny_options(epochs=4, learning_rate=0.05, batch_norm_share=0.5)
    Trainer(model, options, tmp_path, report=lambda _: seen.append(norm.running_mean.clone())).train(*tiny_data())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[2], seen[4])


def test_distillation_follows_the_teacher_where_labels_say_nothing(tmp_path):
    teacher, _ = trained(tmp_path / "teacher")
    student = tiny_network(seed=11)
    options = tiny_options(epochs=8, learning_rate=0.2, distillation=1.0, temperature=2.0)
    data, held_out = tiny_data()
    data.arrays.labels.zero_()
    Trainer(student, options, tmp_path / "student", teacher=teacher).train(data, held_out)
    agreement = evaluate_module(student, held_out).agreement(evaluate_module(teacher, held_out))
    assert agreement > 0.85
    with pytest.raises(InvalidValueError, match="without a teacher"):
        Trainer(student, options, tmp_path)


def test_interruption_says_where_to_go_on(tmp_path):
    def interrupt(result):
        if result.epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"after epoch 1: .*last\.pt"):
        Trainer(tiny_network(), QUICK, tmp_path, report=interrupt).train(*tiny_data())


def test_no_batch_is_an_error(tmp_path):
    with pytest.raises(InvalidValueError, match="smaller batch size"):
        Trainer(tiny_network(), QUICK, tmp_path).train(*tiny_data(batch_size=97))


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"learning_rate": -1.0},
        {"warmup": 1.5},
        {"average_decay": 1.0},
        {"patience": 0},
        {"clip_norm": 0},
    ],
    ids=str,
)
def test_impossible_options_are_refused_when_built(wrong):
    with pytest.raises(InvalidValueError, match=next(iter(wrong))):
        TrainingOptions(**wrong)


def test_a_device_that_is_not_there_is_an_error():
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(InvalidValueError, match="CUDA"):
        choose_device(f"cuda:{torch.cuda.device_count()}")
    for name in ("gpu", "meta"):
        with pytest.raises(InvalidValueError, match="auto, cpu, cuda"):
            choose_device(name)


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "last.pt"
    save_checkpoint({"model": {}, "value": 1}, path)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        save_checkpoint({"model": {}, "value": lambda: None}, path)
    assert load_checkpoint(path)["value"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["last.pt"]


def test_evaluation_leaves_the_mode_and_refuses_foreign_labels():
    model = tiny_network().train()
    evaluate_module(model, tiny_data()[1])
    assert model.training
    images = torch.zeros(2, 3, SIZE, SIZE)
    with pytest.raises(InvalidValueError, match=f"label {CLASSES}: the model has {CLASSES} classes"):
        evaluate_module(model, [(images, torch.tensor([0, CLASSES]))])
    with pytest.raises(InvalidValueError, match="no held-out samples"):
        evaluate_module(model, [])
