"""Norms, activations and the embedding: their definitions in float32, and wrong variants that must fail."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hf_reference import context
from qengine.layers.activation import ACTIVATIONS, GatedActivation
from qengine.layers.embedding import Embedding
from qengine.layers.linear import Linear
from qengine.layers.module import ModelContext
from qengine.layers.norm import HeadNorm, RMSNorm
from qengine.plugin import DeviceInfo
from torch_linear import TorchLinearScheme


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm_by_hand(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return (x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()).float()


def loaded_norm(ctx: ModelContext, weight: torch.Tensor, eps: float = 0.1, offset: float = 0.0) -> RMSNorm:
    norm = RMSNorm(ctx, "n", len(weight), eps, offset)
    norm.load({"n.weight": weight.clone()})
    return norm


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(offset: float) -> None:
    x, weight = normal(5, 32), normal(32, seed=1)
    got = loaded_norm(context(None), weight, offset=offset)(x)
    assert torch.allclose(got, norm_by_hand(x, weight + offset, 0.1), atol=1e-5)
    assert not torch.allclose(got, norm_by_hand(x, weight + offset, 0.0), atol=1e-3)


def test_norm_adds_into_a_float32_residual() -> None:
    ctx = context(None, dtype=torch.bfloat16)
    x, residual, weight = normal(5, 32).bfloat16(), normal(5, 32, seed=2) * 1000, normal(32, seed=1)
    total = residual + x.float()
    stream = residual.clone()
    got = loaded_norm(ctx, weight).add(x, stream)
    assert stream.dtype == torch.float32 and torch.equal(stream, total)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, norm_by_hand(total, weight, 0.1).bfloat16())


def test_norm_of_large_half_precision_values_does_not_overflow() -> None:
    x = torch.full((1, 32), 60000.0, dtype=torch.float16)
    got = loaded_norm(context(None, dtype=torch.float16), torch.ones(32))(x)
    assert torch.allclose(got.float(), torch.ones(1, 32), atol=1e-3)


def test_head_norm_uses_each_weight_on_its_heads() -> None:
    ctx = context(None)
    qk, wq, wk = normal(4, 3, 16), normal(16, seed=1), normal(16, seed=2)
    norm = HeadNorm(loaded_norm(ctx, wq), loaded_norm(ctx, wk), 2, 1)
    want = torch.cat((norm_by_hand(qk[:, :2], wq, 0.1), norm_by_hand(qk[:, 2:], wk, 0.1)), dim=1)
    assert torch.allclose(norm(qk), want, atol=1e-5)
    swapped = HeadNorm(loaded_norm(ctx, wk), loaded_norm(ctx, wq), 2, 1)
    assert not torch.allclose(swapped(qk), want, atol=1e-2)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_activation(kind: str) -> None:
    gate, up = normal(4, 24), normal(4, 24, seed=1)
    got = GatedActivation(kind)(torch.cat((gate, up), dim=1))
    exact = {
        "silu": gate * torch.sigmoid(gate),
        "gelu": gate * 0.5 * (1 + torch.erf(gate / 2**0.5)),
        "gelu_tanh": gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))),
        "relu": gate.clamp(min=0),
    }
    name = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}.get(kind, kind)
    assert torch.allclose(got, exact[name] * up, atol=1e-6)
    assert not torch.allclose(got, exact[name].roll(1, 0) * up, atol=1e-2)


def test_unknown_activation_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'mish'.*silu"):
        GatedActivation("mish")


def test_embedding_keeps_the_compute_dtype_and_answers_in_the_residual_dtype() -> None:
    ctx = context(None, dtype=torch.bfloat16)
    table = normal(10, 6)
    layer = Embedding(ctx, "e", 10, 6, scale=7.07)
    assert [name for name, _ in layer.needs()] == ["e.weight"]
    assert layer.resident_bytes(DeviceInfo("cpu")) == {"embedding": 10 * 6 * 2}
    layer.load({"e.weight": table})
    got = layer(torch.tensor([3, 3, 9]))
    rounded_scale = torch.tensor(7.07).bfloat16().float()
    assert got.dtype == torch.float32
    assert torch.equal(got, functional.embedding(torch.tensor([3, 3, 9]), table.bfloat16().float()) * rounded_scale)


def test_shared_embedding_gathers_from_the_head() -> None:
    ctx = context(None)
    ctx.info = DeviceInfo("cuda")
    layer, head = Embedding(ctx, "e", 10, 6), Linear(ctx, "lm_head", 6, 10)
    layer.share(head)
    assert layer.needs() == [] and layer.resident_bytes(DeviceInfo("cuda")) == {}
    with pytest.raises(RuntimeError, match="not loaded"):
        layer(torch.tensor([1]))
    head.device = torch.device("cpu")
    head.resolve([TorchLinearScheme()])
    table = normal(10, 6)
    head.load({"lm_head.weight": table})
    assert torch.equal(layer(torch.tensor([4])), table[4:5])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_layers_on_cuda_equal_the_cpu(dtype: torch.dtype) -> None:
    from qengine.layers.rotary import RopeSpec, Rotary

    cpu, gpu = context(None, dtype=dtype), context(None, dtype=dtype)
    gpu.device = torch.device("cuda")
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5}[dtype]

    def close(a: torch.Tensor, b: torch.Tensor) -> None:
        assert a.dtype == b.dtype and torch.allclose(a.float(), b.cpu().float(), atol=tolerance, rtol=tolerance)

    x, residual, weight = normal(5, 64).to(dtype), normal(5, 64, seed=1), normal(64, seed=2)
    stream = residual.cuda()
    close(loaded_norm(cpu, weight).add(x, residual), loaded_norm(gpu, weight).add(x.cuda(), stream))
    close(residual, stream)
    for kind in ACTIVATIONS:
        close(GatedActivation(kind)(x), GatedActivation(kind)(x.cuda()))
    qkv, positions = normal(5, 6, 16).to(dtype), torch.tensor([0, 3, 9, 40, 63])
    for rotary_dim in (16, 8):
        spec = RopeSpec("default", 100.0, rotary_dim, 64, 64)
        pairs = []
        for ctx, device in ((cpu, "cpu"), (gpu, "cuda")):
            norm = HeadNorm(loaded_norm(ctx, weight[:16]), loaded_norm(ctx, weight[16:32]), 3, 1)
            rotary = Rotary(ctx, spec)
            qk = qkv.clone().to(device)[:, :4]
            pairs.append([*rotary(qk, 3, rotary.angles(positions.to(device)))])
            pairs[-1] += rotary(norm(qkv.to(device)[:, :4]), 3, rotary.angles(positions.to(device)))
        for a, b in zip(*pairs, strict=True):
            close(a.to(dtype), b)  # a CPU rotates to float32
