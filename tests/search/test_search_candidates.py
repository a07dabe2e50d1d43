"""What is tried, in which order, and what is left out for which reason."""

import math
import sys

import pytest
from made_trials import failed, trial

from quark.cli.options import read_config
from quark.decide.specs import bits_of
from quark.errors import UnknownNameError
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.presets import PRESETS
from quark.search import Limits, Stage
from quark.search.candidates import STAGES, Candidate, Situation, Traits, in_order, ladder, named, reason_to_skip

CNN = Traits(frozenset({"Conv", "Gemm"}))
TRANSFORMER = Traits(frozenset({"MatMul", "LayerNormalization"}))


@pytest.mark.parametrize("traits", [CNN, TRANSFORMER, Traits()])
def test_every_candidate_is_a_legal_config_of_its_own(traits):
    candidates = ladder(traits)
    assert len({candidate.name for candidate in candidates}) == len(candidates)
    assert len({candidate.digest() for candidate in candidates}) == len(candidates)
    bases = {candidate.name for candidate in candidates if candidate.stage is Stage.DIRECT}
    for candidate in candidates:
        settings = settings_of(candidate.config())
        assert not [remark for remark in settings.remarks if any(key in remark for key, _ in candidate.changes)]
        assert candidate.base in bases or (not candidate.base and candidate.stage in (Stage.DIRECT, Stage.MIXED))


def test_finetuned_candidates_have_the_format_of_their_base_and_need_torch(monkeypatch):
    for candidate in ladder(CNN):
        if candidate.stage is Stage.FINETUNED:
            settings = settings_of(candidate.config())
            weight = settings.choose.default.weight
            assert weight is not None
            assert candidate.format == weight.format
            assert candidate.bits == bits_of(settings.choose.default)[1]
    monkeypatch.setitem(sys.modules, "torch", None)
    now = Situation((), Limits(), 0)
    for candidate in ladder(CNN):  # without torch, the list of candidates is the same, and those are not tried
        reason = reason_to_skip(candidate, now) or ""
        assert ("pip install torch" in reason) == (candidate.stage is Stage.FINETUNED)


def test_set_on_the_command_line_makes_the_same_config():
    for candidate in ladder(CNN):
        config = read_config(candidate.preset, candidate.changes)
        assert config.to_dict() == candidate.config().to_dict()


def test_recipes_are_for_networks_that_have_use_for_them():
    assert any(candidate.name.endswith("+SMOOTH") for candidate in ladder(TRANSFORMER))
    assert not any(candidate.name.endswith("+SMOOTH") for candidate in ladder(CNN))
    assert not any(candidate.name.endswith("+CLE") for candidate in ladder(TRANSFORMER))
    assert "MATMUL_NBITS" in {candidate.name for candidate in ladder(TRANSFORMER)}


@pytest.mark.parametrize("has_small_first", [True, False])
def test_from_cheap_to_dear(has_small_first):
    order = in_order(ladder(CNN), has_small_first)
    stages = [STAGES.index(each.stage) for each in order]
    assert stages == sorted(stages)
    direct = [each.bits for each in order if each.stage is Stage.DIRECT]
    assert direct == sorted(direct, reverse=not has_small_first)


def test_formats_choose_among_the_ladder():
    assert {candidate.format for candidate in ladder(CNN, ["mxfp4_e2m1"])} == {"mxfp4_e2m1"}
    with pytest.raises(UnknownNameError, match="mxfp4_e2m1"):
        ladder(CNN, ["mxfp4"])


def test_named_presets_and_nothing_else():
    found = named(["XINT8", "XINT8", "XINT8_ADAROUND", "BF16_MIXED_BFP16"])
    assert [each.name for each in found] == ["XINT8", "XINT8_ADAROUND", "BF16_MIXED_BFP16"]
    assert [each.stage for each in found] == [Stage.DIRECT, Stage.FINETUNED, Stage.MIXED]
    with pytest.raises(UnknownNameError, match="XINT8"):
        named(["XINT9"])


def test_every_direct_preset_is_in_the_table():
    assert {candidate.preset for candidate in ladder(CNN)} <= set(PRESETS)


BASE = trial("XINT8", size=100, drop=3.0)
FINETUNED = Candidate("XINT8_ADAROUND", "XINT8_ADAROUND", Stage.FINETUNED, base="XINT8", bits=8)


@pytest.mark.parametrize(
    ("trials", "limits", "seconds", "said"),
    [
        ([BASE], Limits(drop=1.0), math.inf, None),
        ([BASE], Limits(), math.inf, None),
        ([], Limits(), math.inf, "not tried"),
        ([failed("XINT8")], Limits(), math.inf, "failed"),
        ([BASE], Limits(drop=4.0), math.inf, "within the drop"),
        ([trial("XINT8", drop=0.0)], Limits(), math.inf, "lost nothing"),
        ([BASE], Limits(size_bytes=99), math.inf, "beyond the budget"),
        ([BASE, trial("MX6", size=90, drop=0.5)], Limits(drop=1.0), math.inf, "MX6 is as small"),
        ([BASE, trial("A8W8", size=90, drop=2.0)], Limits(), math.inf, "beaten"),
        ([BASE, trial("A8W8", size=110, drop=2.0)], Limits(), math.inf, None),
        ([BASE], Limits(), 0.0, "time is up"),
        ([BASE], Limits(), 10.0, "about 20 s, and 10 s are left"),
        ([BASE], Limits(), 30.0, None),
    ],
)
def test_what_cannot_win_is_left_out_with_the_reason(trials, limits, seconds, said):
    reason = reason_to_skip(FINETUNED, Situation(trials, limits, 50, seconds))
    assert reason is None if said is None else said in (reason or "")


def test_too_many_bits_for_the_size_are_not_tried():
    wide = Candidate("BF16", "BF16", Stage.DIRECT, bits=16)
    assert "16 bits" in (reason_to_skip(wide, Situation([], Limits(size_bytes=1999), 1000)) or "")
    assert reason_to_skip(wide, Situation([], Limits(size_bytes=2000), 1000)) is None
