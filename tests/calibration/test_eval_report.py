"""The page of an evaluation: complete in itself, escaped, with plots; a clear error without matplotlib."""

from __future__ import annotations

import base64
import html.parser
import re
from typing import Any

import numpy as np
import pytest

from qengine.errors import ConfigError
from qengine_calibration import report
from qengine_calibration.eval_report import html_page, lines
from qengine_calibration.evaluate import Evaluation

SIDE = {
    "model": "<b>&model", "folder": "x", "weights": "14 x awq 4-bit g64", "weights_bytes": 1 << 30,
    "kv_dtype": "fp8_e4m3", "kv_bytes_per_token": 512.0, "kv_scales": ["KV scales, all 2 layers: k=1"],
    "kv_scale_sources": "2 x calibration file /a/b/kv_scales.safetensors (mse)", "dtype": "float16", "device": "cpu",
}  # fmt: skip
DATA = {
    "source": "text.txt", "sha256": "0" * 64, "rows_given": 9, "rows_used": 7, "tokens": 1010, "max_tokens": 4096,
    "window": 101, "windows": 10, "positions": 1000,
}  # fmt: skip


def evaluation(two: bool = True, **changed: Any) -> Evaluation:
    rng = np.random.default_rng(0)
    nll = rng.exponential(2.0, 1000)
    fields = {
        "sides": [SIDE] * (1 + two), "data": DATA, "memory": {}, "seconds": 1.0, "notes": ["a note"],
        "places": np.tile(np.arange(100), 10), "nll_a": nll, "nll_b": nll + 0.01 if two else None,
        "kl": rng.exponential(0.01, 1000) if two else None, "agree": np.ones(1000) if two else None,
    }  # fmt: skip
    return Evaluation(**fields | changed)


class Checker(html.parser.HTMLParser):
    """Every tag is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(("two", "plots"), [(True, 3), (False, 1)])
def test_page(two: bool, plots: int) -> None:
    page = html_page(evaluation(two))
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    pictures = re.findall(r'<img alt="[^"]+" src="data:image/png;base64,([^"]+)">', page)
    assert len(pictures) == plots
    assert all(base64.b64decode(p).startswith(b"\x89PNG") for p in pictures)
    assert not re.search(r"""(src|href)=["'](?!data:)|url\(|@import""", page)
    assert "<b>&model" not in page and "&lt;b&gt;&amp;model" in page
    assert "a note" in page and "7 / 9" in page
    assert ("99th percentile" in page) == two


def test_plots_of_no_difference_at_all() -> None:
    """Zero has no logarithm: such positions stand at the floor."""
    assert html_page(evaluation(kl=np.zeros(1000), nll_b=evaluation().nll_a)).count("<img") == 3


def test_lines_are_aligned_and_hold_the_figures() -> None:
    out = lines(evaluation())
    c = evaluation().summary()["comparison"]
    assert f"KL(A || B), 99th percentile     {c['kl_p99']:.6f} nats" in out
    assert "top-1 agreement                 100.00 %" in out
    assert "perplexity of B over A's        1.01005" in out
    assert out[-1] == "note: a note"
    assert any("2 x calibration file kv_scales.safetensors (mse)" in line for line in out)
    first = [line for line in out[:9] if line]
    assert len({line.rindex("  ") for line in first if line.startswith(("KV dtype", "compute"))}) == 1


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert lines(evaluation())
    with pytest.raises(ConfigError, match=r"needs matplotlib.*qengine-llm\[report\]"):
        html_page(evaluation())
