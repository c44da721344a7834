"""Every way a GPTQ linear is bound on a CPU, against float32 with the meaning that the writer states."""

from __future__ import annotations

import pytest
import torch

from gptq_files import Style, quantize
from qengine.plugin import DeviceInfo, LinearOp, LinearShard, LinearSpec
from qengine_gptq.backend import GptqScheme, SideBySide
from qengine_gptq.zeros import ZeroRule
from qengine_kernels.testing import relative_error

CPU, INFO = torch.device("cpu"), DeviceInfo("cpu")
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 2e-3, torch.float32: 1e-6}
BATCHES = (1, 2, 33)


def scheme_of(style: Style, keep_dense: bool = True) -> GptqScheme:
    rule = ZeroRule(style.stored, style.symmetric, style.by_word)  # type: ignore[arg-type]
    return GptqScheme(style.bits, style.group, rule, style.shuffle is not None, keep_dense)


def make(
    k: int, outs: list[int], styles: list[Style], bias: bool
) -> tuple[list[LinearShard], torch.Tensor, torch.Tensor | None]:
    """Shards, their dense weights stacked, and their biases."""
    shards, weights, biases = [], [], []
    for i, (n, style) in enumerate(zip(outs, styles, strict=True)):
        tensors, meaning = quantize(torch.randn(n, k), style)
        if bias:
            tensors["bias"] = torch.randn(n).half()
            biases.append(tensors["bias"].float())
        shards.append(LinearShard(LinearSpec(f"m{i}", k, n, bias), tensors))
        weights.append(meaning)
    return shards, torch.cat(weights), torch.cat(biases) if bias else None


def check(op: LinearOp, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
    assert (op.out_features, op.in_features) == weight.shape
    for m in BATCHES:
        x = torch.randn(m, op.in_features).to(dtype)
        want = torch.nn.functional.linear(x.float(), weight, bias)
        y = op(x)
        assert y.dtype is dtype and y.shape == want.shape
        assert relative_error(y, want) < LIMIT[dtype], (op.kernel, m)
        for wrong in (weight.roll(1, 0), weight.roll(1, 1)):
            assert relative_error(y, torch.nn.functional.linear(x.float(), wrong, bias)) > 0.1


# K, N, group, symmetric, shuffled: plain, ragged last group, one group, a group int4 has no kernel for
CASES = [
    (128, 64, 64, True, None), (128, 48, 32, False, 5), (96, 32, 64, True, 6), (128, 64, -1, False, None),
    (200, 32, 32, True, 7), (64, 32, 16, False, 8),
]  # fmt: skip


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_bound(bits: int, case: tuple[int, int, int, bool, int | None], dtype: torch.dtype) -> None:
    k, n, group, symmetric, shuffle = case
    torch.manual_seed(0)
    style = Style(bits, group, symmetric, "gptq_v2", shuffle=shuffle)
    for keep, bias, count in ((True, True, 3), (False, False, 1)):
        scheme = scheme_of(style, keep)
        shards, weight, b = make(k, [n] * count, [style] * count, bias)
        op = scheme.bind(shards, CPU, INFO, dtype)
        assert not any(s.tensors for s in shards), "bind takes ownership"
        assert not op.notes
        check(op, weight, b, dtype)
        assert op.nbytes == scheme.resident_bytes(LinearSpec("m0", k, n * count, bias), INFO, dtype)


def test_shards_with_other_maps_run_side_by_side() -> None:
    """Fused q/k/v whose inputs are sorted differently: each shard with its own order, equal neighbours together."""
    torch.manual_seed(0)
    styles = [Style(4, 32, shuffle=seed) for seed in (1, 2, 2)]
    for dtype in (torch.bfloat16, torch.float32):
        shards, weight, bias = make(128, [64, 32, 32], styles, True)
        op = scheme_of(styles[0], keep_dense=False).bind(shards, CPU, INFO, dtype)
        assert isinstance(op, SideBySide) and [o.out_features for o in op.ops] == [64, 64]
        check(op, weight, bias, dtype)
        assert set(op.buffers()) >= ({"0.order", "1.order"} if dtype is torch.bfloat16 else {"0.weight", "1.weight"})


def test_one_map_for_all_would_be_wrong() -> None:
    """Control of the former: the first shard's map on all shards."""
    torch.manual_seed(0)
    shards, weight, _ = make(128, [32, 32], [Style(4, 32, shuffle=1), Style(4, 32, shuffle=2)], False)
    shards[1].tensors["g_idx"] = shards[0].tensors["g_idx"].clone()
    op = scheme_of(Style(4, 32, shuffle=1)).bind(shards, CPU, INFO, torch.float32)
    x = torch.randn(8, 128)
    assert relative_error(op(x)[:, :32], x @ weight[:32].t()) < 1e-6
    assert relative_error(op(x)[:, 32:], x @ weight[32:].t()) > 0.05


def test_notes_name_their_shards() -> None:
    torch.manual_seed(0)
    style = Style(4, 32)
    shards, weight, _ = make(128, [32, 32], [style, Style(4, 32, shuffle=1)], False)
    shards[0].tensors["g_idx"].zero_()
    scheme = GptqScheme(4, 32, ZeroRule("gptq_v2", True))
    op = scheme.bind(shards, CPU, INFO, torch.float32)
    texts = sorted((name, text.split(" ")[0]) for name, text in op.notes)
    assert texts == [("m0", "checkpoint_format"), ("m0", "g_idx"), ("m1", "checkpoint_format"), ("m1", "g_idx")]
    check(op, weight, None, torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_refused(value: float) -> None:
    shards, _, _ = make(64, [32, 32, 32], [Style(4, 32)] * 3, False)
    for i in (0, 2):
        shards[i].tensors["scales"][1, 3] = value
    with pytest.raises(ValueError, match=r"m0\.scales: 1 of 64 values are not finite; m2\.scales"):
        scheme_of(Style(4, 32)).bind(shards, CPU, INFO, torch.float32)


def test_scales_beyond_float16_are_refused() -> None:
    shards, _, _ = make(64, [32], [Style(4, 32, scale_dtype=torch.float32)], False)
    shards[0].tensors["scales"][0, 0] = 1e6
    with pytest.raises(ValueError, match=r"m0\.scales: a value exceeds float16"):
        scheme_of(Style(4, 32)).bind(shards, CPU, INFO, torch.float32)


def test_kernels_say_what_runs() -> None:
    def kernel(bits: int, dtype: torch.dtype = torch.bfloat16, keep: bool = False) -> str:
        shards, _, _ = make(128, [32], [Style(bits, 32)], False)
        return scheme_of(Style(bits, 32), keep).bind(shards, CPU, INFO, dtype).kernel

    assert kernel(4).startswith("int4")
    assert kernel(3).startswith("3-bit codes held in 4 bits: int4")
    assert kernel(8) == "8-bit as two int4 halves for every M (no dense copy kept)"
    assert kernel(8, keep=True).startswith("8-bit dequantised at load, ")
    assert kernel(2, torch.float32).startswith("2-bit dequantised at load, float32")


def test_memory_and_capabilities() -> None:
    spec = LinearSpec("m", 512, 512)
    for bits, bytes_per_weight in ((2, 0.65), (4, 0.65), (8, 1.3)):
        full = scheme_of(Style(bits, 32))
        compact = full.compact()
        assert compact is not None and compact.compact() is None and compact.key != full.key
        small = compact.resident_bytes(spec, INFO, torch.bfloat16)
        assert small < bytes_per_weight * 512 * 512 < full.resident_bytes(spec, INFO, torch.bfloat16)
        turing, hopper = DeviceInfo("cuda", capability=(7, 5)), DeviceInfo("cuda", capability=(9, 0))
        assert full.capability(hopper, torch.bfloat16).kind == "native"
        assert full.capability(turing, torch.float16).kind == "native"
        assert "--dtype half" in full.capability(turing, torch.bfloat16).reason
        assert not full.capability(DeviceInfo("cuda", capability=(7, 0)), torch.float16)
        assert full.capability(INFO, torch.float32).kind == "emulated"
        assert full.capability(INFO, torch.bfloat16).kind == ("emulated" if bits == 8 else "native")
        assert compact.capability(INFO, torch.bfloat16).kind == "native"
        # scales of 2 bytes; in tiles, which tensor cores take, 4 with the zero
        codes, groups = 512 * 512 * bits // 8, 16 * 512
        assert full.resident_bytes(spec, turing, torch.float16) == codes + groups * 2
        assert full.resident_bytes(spec, hopper, torch.bfloat16) == codes + groups * (4 if bits == 4 else 2)
        assert full.of_experts().resident_bytes(spec, hopper, torch.bfloat16) == codes + groups * 2
    three = scheme_of(Style(3, 32))
    assert three.resident_bytes(spec, hopper, torch.bfloat16) == 512 * 512 // 2 + 16 * 512 * 4
    assert "held in 4 bits" in three.capability(hopper, torch.bfloat16).reason
