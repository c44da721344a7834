"""The damage report of a calibration run: end-to-end figures on held-out text, JSON and a page beside the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qengine.config import EngineConfig
from qengine.errors import UserError
from qengine.runtime.checkpoint_writer import write_json
from qengine_calibration import damage_report
from qengine_calibration.eval_text import TextSource
from qengine_calibration.evaluate import evaluate
from qengine_calibration.report import has_matplotlib, write_text

Say = Callable[[str], None]
Tick = Callable[[int, int], None]


def end_to_end(
    before: EngineConfig, after: EngineConfig, tokens: int, say: Say = lambda line: None,
    tick: Tick = lambda done, total: None, max_memory: int | None = None,
) -> dict[str, Any]:
    """Figures of `after` beside `before` on `tokens` tokens of the built-in held-out text, ready for JSON; or why there
    are none ("not_measured"): a model that is calibrated layer by layer need not fit as a whole within `max_memory`."""
    try:
        source = TextSource.open(None)
        pair = [before, after]
        return evaluate(pair, source, max_tokens=tokens, max_memory=max_memory, say=say, tick=tick).summary()
    except UserError as e:
        return {"not_measured": str(e)}


def write_report(facts: dict[str, Any], file: Path, say: Say = lambda line: None) -> None:
    """`file` (.json) with all figures and, where matplotlib is installed, a page of the same name (.html)."""
    partial = file.with_name(f".{file.name}.partial")
    write_json(partial, facts)
    partial.rename(file)
    if has_matplotlib():
        write_text(file.with_suffix(".html"), damage_report.html_page(facts))
        say(f"damage report: {file.with_suffix('.html')}")
    else:
        say(f"damage report: {file} (as a page with plots: pip install 'qengine-llm[report]')")
