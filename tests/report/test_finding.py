"""Findings without the places of a person's machine."""

import pytest

from quark.report.installation import Finding, Health


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("1.0 in /srv/ann/env/quark", "1.0 in <...>/quark"),
        ("'/srv/ann/x.so': not found", "'<...>/x.so': not found"),
        (r"C:\Users\ann\quark.dll does not load", "<...>/quark.dll does not load"),
        ("(/srv/ann/lib/a.so: wrong ELF class)", "(<...>/a.so: wrong ELF class)"),
        ("pip install numpy/onnx 1/2", "pip install numpy/onnx 1/2"),
    ],
)
def test_absolute_paths_are_cut_down(text, shown):
    finding = Finding("x", Health.OK, text, text, text).without_paths()
    assert (finding.detail, finding.consequence, finding.remedy) == (shown, shown, shown)


def test_json_has_every_field_as_text():
    content = Finding("x", Health.WARNING, "a", "b", "c").to_json()
    assert content == {"check": "x", "health": "warning", "detail": "a", "consequence": "b", "remedy": "c"}
