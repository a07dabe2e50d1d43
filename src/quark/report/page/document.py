"""The page as text: its parts joined, the diagnosis inside as JSON.

The page may run its own script and style and nothing else: a Content Security Policy names them by their hashes, and
forbids every connection. The same diagnosis gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from quark.diagnosis import Action, Diagnosis
from quark.fidelity import COLLAPSED_COSINE, COLLAPSED_SQNR_DB, OK_COSINE, OK_SQNR_DB
from quark.report.summary import MEANINGS

FOLDER = "quark.report.page"
STYLES = ("colours.css", "layout.css", "parts.css", "layers.css", "print.css")  # print last: it overrules the others
SCRIPTS = (
    "elements.js",
    "numbers.js",
    "theme.js",
    "overview.js",
    "chart.js",
    "histograms.js",
    "remedies.js",
    "layers.js",
    "layer_filter.js",
    "findings.js",
    "making.js",
    "start.js",
)
ACTIONS: Mapping[Action, str] = {
    Action.EXCLUDE: "Leave in float",
    Action.MORE_BITS: "More bits",
    Action.PER_CHANNEL: "Scale per channel",
    Action.EQUALIZE: "Equalize layers",
    Action.SMOOTH: "SmoothQuant",
    Action.CALIBRATE: "Calibrate",
    Action.BIAS_CORRECTION: "Correct biases",
    Action.ADAROUND: "Finetune",
}


def page_of(diagnosis: Diagnosis) -> str:
    """The page. It holds `diagnosis.to_dict()` whole, in the script element with the id `diagnosis`."""
    style = "\n".join(_part(name) for name in STYLES)
    script = '(() => {\n"use strict";\n' + "\n".join(_part(name) for name in SCRIPTS) + "})();\n"
    places = {
        "policy": _policy(style, script),
        "style": style,
        "script": script,
        "facts": as_json_block(_facts()),
        "diagnosis": as_json_block(diagnosis.to_dict()),
    }
    # in one pass: what was put in is not looked at again
    return re.sub(r"\{\{(\w+)\}\}", lambda place: places[place[1]], _part("page.html"))


def as_json_block(content: Any) -> str:
    """JSON that can stand in a script element: it holds no `<`, so that no name ends the element or opens another.

    >>> as_json_block({"name": "</script>"})
    '{"name":"\\\\u003c/script>"}'
    """
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _facts() -> dict[str, Any]:
    """What the script has to know besides the diagnosis; stated elsewhere, repeated nowhere."""
    return {
        "meanings": {verdict.value: text for verdict, text in MEANINGS.items()},
        "actions": {action.value: label for action, label in ACTIONS.items()},
        "ok": {"sqnr_db": OK_SQNR_DB, "cosine": OK_COSINE},
        "collapsed": {"sqnr_db": COLLAPSED_SQNR_DB, "cosine": COLLAPSED_COSINE},
    }


def _policy(style: str, script: str) -> str:
    """Elements' own style attributes are forbidden too: the script sets properties, which is allowed."""
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {_source_hash(style)}",
            f"script-src {_source_hash(script)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _source_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _part(name: str) -> str:
    return (files(FOLDER) / name).read_text(encoding="utf-8")
