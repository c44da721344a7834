"""Row maxima against torch, ties and values that are not finite among them."""

from __future__ import annotations

import pytest
import torch

from qengine_kernels.row_max.kernel import BLOCK, launch_row_max
from qengine_kernels.row_max.reference import row_max_reference
from qengine_kernels.testing import poisoned_empty


@pytest.mark.parametrize("width", [1, 100, BLOCK, 3 * BLOCK + 17])
def test_equals_torch(width: int, device: torch.device) -> None:
    wide = torch.randn(5, width + 8, device=device)
    x = wide[:, :width]
    x[1, width // 2] = x[1, width - 1] = 50.0  # the first of two
    x[2] = -torch.inf
    with poisoned_empty():
        best, places, checked = launch_row_max(x)
    want_best, want_places, want_checked = row_max_reference(x)
    ordinary = [0, 1, 3, 4]
    assert torch.equal(best, want_best) and torch.equal(checked, want_checked)
    assert torch.equal(places[ordinary], want_places[ordinary]) and places[1] == width // 2
    assert checked[2] == -1 and 0 <= int(places[2]) < width
    assert not torch.equal(launch_row_max(x.roll(1, 1))[1], places) or width == 1, "control"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite(value: float, device: torch.device) -> None:
    x = torch.randn(3, 2 * BLOCK + 5, device=device)
    x[1, BLOCK + 3] = value
    best, places, checked = launch_row_max(x)
    assert not best[1].isfinite() and checked.tolist()[1] == -1 and 0 <= int(places[1]) < x.shape[1]
    assert checked[[0, 2]].tolist() == x[[0, 2]].argmax(1).tolist()


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        launch_row_max(torch.zeros(2, 3, dtype=torch.float16))
