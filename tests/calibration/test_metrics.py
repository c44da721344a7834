"""The arithmetic of an evaluation against float64 sums, and figures that come near to it but are wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from qengine_calibration.metrics import Tally, compare, comparison, perplexity

ROWS, VOCAB = 300, 50


@pytest.fixture(scope="module")
def logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    a = torch.randn(ROWS, VOCAB, generator=gen) * 2
    b = a + torch.randn(ROWS, VOCAB, generator=gen) * torch.rand(ROWS, 1, generator=gen)
    return a, b, torch.randint(VOCAB, (ROWS,), generator=gen)


def plain(a: torch.Tensor, b: torch.Tensor, targets: torch.Tensor) -> dict[str, np.ndarray]:
    """One position after the other, in float64, from the definitions."""
    out: dict[str, list[float]] = {"nll_a": [], "nll_b": [], "kl": [], "agree": []}
    for x, y, t in zip(a.double().tolist(), b.double().tolist(), targets.tolist(), strict=True):
        p, q = ([math.exp(v) for v in row] for row in (x, y))
        p, q = [v / sum(p) for v in p], [v / sum(q) for v in q]
        out["nll_a"].append(-math.log(p[t]))
        out["nll_b"].append(-math.log(q[t]))
        out["kl"].append(sum(u * math.log(u / v) for u, v in zip(p, q, strict=True)))
        out["agree"].append(float(p.index(max(p)) == q.index(max(q))))
    return {name: np.array(values) for name, values in out.items()}


def test_positions(logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    a, b, targets = logits
    want = plain(a, b, targets)
    tally = Tally()
    for i in range(0, ROWS, 70):
        tally.add(compare(a[i : i + 70], b[i : i + 70], targets[i : i + 70]))
    for name, values in want.items():
        got = tally.array(name)
        assert got is not None and np.allclose(got, values, rtol=1e-4, atol=1e-6), name
    reverse = compare(b, a, targets).kl
    assert reverse is not None and not np.allclose(reverse.numpy(), want["kl"], rtol=1e-2)
    assert 0 < want["agree"].mean() < 1


def test_figures(logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    w = plain(*logits)
    c = comparison(w["nll_a"], w["nll_b"], w["kl"], w["agree"])
    ordered = np.sort(w["kl"])
    place = 0.99 * (ROWS - 1)
    low = int(place)
    p99 = ordered[low] + (place - low) * (ordered[low + 1] - ordered[low])
    assert c["kl_p99"] == pytest.approx(p99, rel=1e-12) and c["kl_p99"] > np.percentile(w["kl"], 98)
    assert c["kl_mean"] == pytest.approx(sum(w["kl"]) / ROWS) and c["kl_max"] == ordered[-1]
    assert c["top1_agreement"] == w["agree"].sum() / ROWS
    assert c["perplexity_ratio"] == pytest.approx(perplexity(w["nll_b"]) / perplexity(w["nll_a"]))
    assert perplexity(w["nll_a"]) == pytest.approx(math.exp(sum(w["nll_a"]) / ROWS))
    assert perplexity(w["nll_a"]) != pytest.approx(np.exp(w["nll_a"]).mean(), rel=0.05)
    d = w["nll_b"] - w["nll_a"]
    assert c["nll_change_standard_error"] == pytest.approx(math.sqrt(((d - d.mean()) ** 2).sum() / (ROWS - 1) / ROWS))


def test_equal_logits_cost_nothing(logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    a, _, targets = logits
    part = compare(a, a.clone(), targets)
    assert part.kl is not None and part.agree is not None
    assert part.kl.abs().max() == 0 and bool(part.agree.all())
    shifted = compare(a, a + 5, targets)  # a constant changes no probability
    assert shifted.kl is not None and shifted.kl.min() >= 0 and shifted.kl.max() < 1e-5


def test_a_token_that_neither_allows_counts_nothing() -> None:
    a, b = torch.tensor([[1.0, 2.0, -math.inf]]), torch.tensor([[2.0, 1.0, -math.inf]])
    with_mask, without = compare(a, b, torch.tensor([0])), compare(a[:, :2], b[:, :2], torch.tensor([0]))
    assert with_mask.kl is not None and without.kl is not None
    assert torch.allclose(with_mask.kl, without.kl) and with_mask.kl > 0


def test_inputs_are_left_alone(logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    a, b, targets = (t.clone() for t in logits)
    compare(a, b, targets)
    assert torch.equal(a, logits[0]) and torch.equal(b, logits[1])


def test_one_model_alone() -> None:
    tally = Tally()
    tally.add(compare(torch.zeros(4, 8), None, torch.tensor([0, 1, 2, 3])))
    nll = tally.array("nll_a")
    assert nll is not None and perplexity(nll) == pytest.approx(8)
    assert tally.array("kl") is None
