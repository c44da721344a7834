"""The progress of long commands where nobody watches a bar."""

from __future__ import annotations

import pytest

from qengine_calibration import progress


def test_lines_stand_for_the_bar_in_a_log_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.bar("calibrate") as tick:
        for done in range(1, 31):
            now = done * 6.0
            tick(done, 30)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10, "one at most every 15 seconds"
    assert lines[0] == "calibrate: 10%, 0:00:18 gone, about 0:02:42 left"
    assert lines[-1] == "calibrate: 100%, 0:03:00 gone"


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.bar("calibrate", quiet=True) as tick:
        tick(1, 1)
    assert capsys.readouterr().err == ""
