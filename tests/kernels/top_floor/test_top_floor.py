"""What top_k and top_p keep: the search against sorting, ties, floors and rows of every shape among them."""

from __future__ import annotations

import pytest
import torch

from qengine_kernels.testing import poisoned_empty
from qengine_kernels.top_floor.kernel import TOP_FLOOR, launch_top_floor
from qengine_kernels.top_floor.reference import top_floor_reference

BLOCK = TOP_FLOOR["BLOCK"]
WIDTHS = [1, 100, BLOCK + 17]


def logits(width: int, spread: float, rows: int = 6) -> torch.Tensor:
    """Rows whose maximum is 0: values apart from each other, ties, one value far above the rest, and -inf."""
    x = torch.randn(rows, width) * spread
    x[1] = (x[1] / spread).round() * spread
    x[2, width // 2] += 30 * spread
    x[3, ::3] = -torch.inf
    x[4] = 0.5
    x[3, width - 1] = 1.0
    return x - x.amax(dim=1, keepdim=True)


def check(x: torch.Tensor, k: int, top_p: float, floor: float, found: torch.Tensor) -> None:
    """By definition, in float64: of what `floor` and top_k leave, the kept values hold their share of the probability,
    and those above the lowest of them do not."""
    wide = x.double()
    for row, low in zip(wide, found.double(), strict=True):
        left = row >= max(row.sort(descending=True).values[k - 1].item(), floor)
        kept = row >= low
        assert not bool((kept & ~left).any()) and bool(kept.any())
        p = torch.where(left, row.exp(), 0.0)
        wanted = top_p * p.sum().item()
        rounding = 1e-5 * wanted
        assert p[kept].sum().item() >= wanted - rounding
        if top_p < 1:
            lowest = row[kept].amin()
            assert p[row > lowest].sum().item() < wanted + rounding
        else:
            assert torch.equal(kept, left)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("top_p", [0.05, 0.9, 1.0])
def test_keeps_what_it_should(width: int, top_p: float, device: torch.device) -> None:
    for spread, k, floor in ((1.0, width, -torch.inf), (5.0, max(1, width // 3), -torch.inf), (0.01, width, -0.02)):
        x = logits(width, spread)
        if k == width and floor == -torch.inf and top_p == 1:
            continue  # nothing is asked for
        count = len(x)
        with poisoned_empty():
            found = launch_top_floor(
                x.to(device), torch.arange(count, device=device), torch.full((count,), k, device=device),
                torch.full((count,), top_p, device=device), torch.full((count,), floor, device=device),
            ).cpu()  # fmt: skip
        check(x, k, top_p, floor, found)


def test_controls_the_check_sees_one_value_too_many_or_too_few() -> None:
    x = logits(100, 1.0, rows=5)[:1]
    ordered = x[0].sort(descending=True).values
    right = top_floor_reference(x, x.exp(), torch.tensor([0]), 100, torch.tensor([100]), torch.tensor([0.9]),
                                torch.tensor([-torch.inf]))  # fmt: skip
    check(x, 100, 0.9, -torch.inf, right)
    at = int((ordered == right).nonzero()[0, 0])
    for wrong in (at - 1, at + 1):
        with pytest.raises(AssertionError):
            check(x, 100, 0.9, -torch.inf, ordered[wrong : wrong + 1])
    check(x, 30, 1.0, -torch.inf, ordered[29:30])
    for wrong in (28, 30):
        with pytest.raises(AssertionError):
            check(x, 30, 1.0, -torch.inf, ordered[wrong : wrong + 1])


def test_rows_are_those_asked_for_with_their_own_limits(device: torch.device) -> None:
    """As the reference to the bit where shares of probability are apart, in any order, in a matrix with wider rows; a
    row's result is that of the row alone."""
    width = BLOCK + 40
    apart = -torch.stack([torch.randperm(width) for _ in range(5)]).float() * 0.02
    wide = torch.nn.functional.pad(apart, (0, 24), value=9.0).to(device)
    x = wide[:, :width]
    rows = torch.tensor([4, 0, 2, 1], device=device)
    top_k = torch.tensor([width, 300, 1000, 1], device=device)
    top_p = torch.tensor([0.7, 1.0, 0.95, 0.5], device=device)
    floor = torch.tensor([-torch.inf, -torch.inf, -3.0, -torch.inf], device=device)
    found = launch_top_floor(x, rows, top_k, top_p, floor)
    want = top_floor_reference(x, x.exp(), rows, width, top_k, top_p, floor)
    assert torch.equal(found, want) and len(set(found.tolist())) == 4
    assert not torch.equal(launch_top_floor(x, rows.flip(0), top_k, top_p * 0.9, floor), want), "control"
    for i in range(4):
        one = slice(i, i + 1)
        alone = launch_top_floor(x[rows[one]], rows[one] * 0, top_k[one], top_p[one], floor[one])
        assert torch.equal(alone, found[one])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_end(value: float, device: torch.device) -> None:
    x = torch.randn(2, 300)
    x[0, 7] = value
    x = (x - x.amax(dim=1, keepdim=True)).to(device)
    two = torch.ones(2, device=device)
    found = launch_top_floor(x, torch.arange(2, device=device), (290 * two).long(), 0.5 * two, -torch.inf * two)
    assert (x[1] >= found[1]).any()


def test_other_types_are_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="float32"):
        launch_top_floor(torch.zeros(1, 3, dtype=torch.float16), one.long() * 0, one.long(), one, one)
