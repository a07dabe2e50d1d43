"""HTML pages in one file, such as the accuracy report.

A page may run only its own script and style: a Content Security Policy names them by their hashes, and forbids every
connection. The same content gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from quark.compare import COLLAPSED_COSINE, COLLAPSED_SQNR_DB, OK_COSINE, OK_SQNR_DB
from quark.diagnosis import Action, Diagnosis
from quark.report.summary import MEANINGS

FOLDER = "quark.report.page"
SHARED_STYLES = ("colours.css", "layout.css", "parts.css", "tables.css")
PRINT_STYLE = "print.css"  # last: it overrides the others
SHARED_SCRIPTS = ("elements.js", "theme.js", "tables.js")
REPORT_STYLES = ("layers.css",)
REPORT_SCRIPTS = (
    "numbers.js",
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
REPORT_SECTIONS = (
    ("ranking", "Sensitive layers"),
    ("layers", "Layers"),
    ("skipped", "In float"),
    ("lint", "NPU"),
    ("making", "Making"),
)
ACTIONS: Mapping[Action, str] = {
    Action.EXCLUDE: "Exclude",
    Action.MORE_BITS: "More bits",
    Action.PER_CHANNEL: "Scale per channel",
    Action.EQUALIZE: "Equalize layers",
    Action.SMOOTH: "SmoothQuant",
    Action.CALIBRATE: "Calibrate",
    Action.BIAS_CORRECTION: "Correct biases",
    Action.ADAROUND: "Finetune",
}


def page_of(diagnosis: Diagnosis) -> str:
    """Return the accuracy report as text. The script element `diagnosis` contains all of `diagnosis.to_dict()`."""
    facts = {  # what the script needs to know besides the diagnosis
        "meanings": {verdict.value: text for verdict, text in MEANINGS.items()},
        "actions": {action.value: label for action, label in ACTIONS.items()},
        "ok": {"sqnr_db": OK_SQNR_DB, "cosine": OK_COSINE},
        "collapsed": {"sqnr_db": COLLAPSED_SQNR_DB, "cosine": COLLAPSED_COSINE},
    }
    return document(
        "accuracy report",
        "quark accuracy report",
        _part("report.html"),
        style="\n".join(map(_part, REPORT_STYLES)),
        script="\n".join(map(_part, REPORT_SCRIPTS)),
        sections=REPORT_SECTIONS,
        tools='<button type="button" id="save-json" class="quiet">Save JSON</button>',
        data={"facts": facts, "diagnosis": diagnosis.to_dict()},
    )


def document(
    what: str,
    title: str,
    body: str,
    *,
    style: str = "",
    script: str = "",
    sections: Sequence[tuple[str, str]] = (),
    tools: str = "",
    data: Mapping[str, Any] | None = None,
) -> str:
    """Return a page as text.

    `what` stands beside the brand. `body` and `tools` (buttons of the header) are HTML, so names in them have to be
    escaped. `style` and `script` come after the shared ones. `sections` are ids and labels of the navigation. `data` is
    JSON by the id of its script element.
    """
    style = "\n".join([*map(_part, SHARED_STYLES), style, _part(PRINT_STYLE)])
    script = '(() => {\n"use strict";\n' + "\n".join([*map(_part, SHARED_SCRIPTS), script]) + "})();\n"
    blocks = (
        f'<script type="application/json" id="{name}">{as_json_block(content)}</script>'
        for name, content in (data or {}).items()
    )
    places = {
        # this also forbids style attributes of elements; the script sets properties, which is allowed
        "policy": f"default-src 'none'; style-src {_source_hash(style)}; script-src {_source_hash(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        "title": escape(title),
        "style": style,
        "what": escape(what),
        "sections": "".join(f'<a href="#{name}">{escape(label)}</a>' for name, label in sections),
        "tools": tools,
        "body": body,
        "blocks": "\n".join(blocks),
        "script": script,
    }
    # in one pass, so that inserted text is not searched again
    return re.sub(r"\{\{(\w+)\}\}", lambda place: places[place[1]], _part("page.html"))


def as_json_block(content: Any) -> str:
    """Return JSON for a script element, without `<`, so that no name can end the element or open another.

    >>> as_json_block({"name": "</script>"})
    '{"name":"\\\\u003c/script>"}'
    """
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _source_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _part(name: str) -> str:
    return (files(FOLDER) / name).read_text(encoding="utf-8")
