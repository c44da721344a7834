"""KV scales chosen by what rounding does to the attention's output."""

from __future__ import annotations

import pytest
import torch

from qengine.plugin import AttentionSpec, KVDtype
from qengine_calibration import kv_methods
from qengine_calibration.attention_error import Example, attention_error, side_errors
from qengine_calibration.kv_methods import choose
from qengine_calibration.observe import KVObserver, plain_attention
from qengine_kv_fp8.backend import Fp8E4M3KV, Fp8E5M2KV

LENGTH = 96
SPEC = AttentionSpec(4, 2, 16, 16**-0.5)


def observed(
    offset: float = 0.0, size: float = 1.0, spec: AttentionSpec = SPEC, sequences: int = 4, seed: int = 0
) -> KVObserver:
    """Gaussian queries, keys and values; keys have `offset` in one channel of every token."""
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sequences * LENGTH, n, spec.head_dim, generator=gen) for n in (spec.num_heads, 2, 2))
    k = k * size
    k[..., 3] += offset
    seen = KVObserver(spec)
    seen.see(q / size, k, v * size, LENGTH)
    return seen


def plugins(kind: type[KVDtype], spec: AttentionSpec = SPEC) -> tuple[KVDtype, KVDtype]:
    return kind(spec, "k", torch.float32), kind(spec, "v", torch.float32)


def chosen(seen: KVObserver, plugin: KVDtype, method: str = "output", granularity: str = "head") -> torch.Tensor:
    sizes = seen.k if plugin.side == "k" else seen.v
    return choose(sizes, seen.examples, plugin, method, granularity, "keys").scale


@pytest.mark.parametrize("changed", [{}, {"sliding_window": 7}, {"soft_cap": 2.0}])
def test_examples_attend_as_the_layer_does(changed: dict[str, float]) -> None:
    """Beside the layer's own attention; fewer queries than tokens, the last one among them."""
    spec = AttentionSpec(4, 2, 16, 0.5, **changed)  # type: ignore[arg-type]
    gen = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(LENGTH, n, 16, generator=gen) for n in (4, 2, 2))
    example = Example.of(spec, q, k, v)
    assert len(example.q) == 64 and int(example.positions[-1]) == LENGTH - 1
    got = example.output(example.weights(k), v).flatten(0, 1).transpose(0, 1)
    want = plain_attention(q, k, v, spec, LENGTH)[example.positions]
    assert torch.allclose(got, want, atol=1e-5)
    other = Example.of(AttentionSpec(4, 2, 16, 0.5), q, k, v)
    plain = other.output(other.weights(k), v).flatten(0, 1).transpose(0, 1)
    assert torch.allclose(plain, want, atol=1e-5) == (not changed), "control: without window and soft cap"


def test_errors_of_sides_add_up_to_the_layers() -> None:
    seen = observed()
    k, v = plugins(Fp8E5M2KV)
    one = torch.ones(1)
    exact = sum(float(e.output(e.weights(e.k), e.v).double().square().sum()) for e in seen.examples)
    both = sum(float(side_errors(seen.examples, side, torch.ones(1, 1)).sum()) for side in (k, v))
    assert attention_error(seen.examples, (k, v), one, one) == pytest.approx((both / exact) ** 0.5, rel=0.1)


@pytest.mark.parametrize("kind", [Fp8E4M3KV, Fp8E5M2KV])
def test_an_offset_that_all_keys_share_does_not_decide(kind: type[KVDtype]) -> None:
    """The rounding error of a large channel that is the same in every key moves no softmax; mse looks at little else.
    The other channels tell the keys apart: they are +1 and -1, which scale 1.0 keeps."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4 * LENGTH, n, 16, generator=gen) for n in (4, 2, 2))
    k = k.sign()
    k[..., 3] = 21.5
    seen = KVObserver(SPEC)
    seen.see(q, k, v, LENGTH)
    plugin = plugins(kind)[0]

    def error(method: str) -> float:
        return float(side_errors(seen.examples, plugin, chosen(seen, plugin, method)[None]).sum())

    assert error("output") < 1e-9 and error("mse") > 1e-3


@pytest.mark.parametrize("granularity", ["head", "tensor"])
def test_noise_changes_no_scale(granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that every scale rounds equally well keep 1.0: the same bytes as without calibration."""
    sides = plugins(Fp8E5M2KV)

    def scales() -> torch.Tensor:
        return torch.cat([chosen(observed(seed=s), side, granularity=granularity) for s in range(2) for side in sides])

    assert (scales() == 1).all()
    monkeypatch.setattr(kv_methods, "SURE", -1.0)
    assert (scales() != 1).any(), "control: the best on the examples, sure or not"


@pytest.mark.parametrize("size", [1e-4, 3000.0])
def test_sizes_that_do_not_fit_are_scaled(size: float) -> None:
    """Too small to be told apart at 1.0, or clipped there."""
    seen = observed(size=size)
    one = torch.ones(1)
    k, v = plugins(Fp8E4M3KV)
    scales = chosen(seen, k), chosen(seen, v)
    for scale, sizes in zip(scales, (seen.k, seen.v), strict=True):
        ratio = scale / (sizes.amax / 448)
        assert ratio.min() > 0.9 and ratio.max() < 4.1
    assert attention_error(seen.examples, (k, v), *scales) < 0.06
    assert attention_error(seen.examples, (k, v), one, one) > 0.3


def test_one_clipped_outlier_is_enough_to_leave_1() -> None:
    """A single token hardly counts in any average of the text's outputs, but to clip it is a risk."""
    seen = observed()
    seen.v.see(torch.full((1, 2, 16), 2000.0))
    assert (chosen(seen, plugins(Fp8E4M3KV)[1]) > 2000 / 448 * 0.99).all()


def test_examples_are_the_first_sequences_however_text_is_cut() -> None:
    gen = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(60 * LENGTH, n, 16, generator=gen) for n in (4, 2, 2))
    kept = []
    for at_once in (60, 7):
        seen = KVObserver(SPEC)
        for i in range(0, 60, at_once):
            part = slice(i * LENGTH, (i + at_once) * LENGTH)
            seen.see(q[part], k[part], v[part], LENGTH)
        kept.append(seen.examples)
    assert len(kept[0]) == 4096 // LENGTH == len(kept[1])
    assert all(torch.equal(a.k, b.k) and torch.equal(a.q, b.q) for a, b in zip(*kept, strict=True))
