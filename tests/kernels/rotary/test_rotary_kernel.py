"""Rotary embedding against the rotation of complex numbers, in float64."""

from __future__ import annotations

import pytest
import torch

from qengine_kernels.rotary import rotary_
from qengine_kernels.rotary.kernel import launch_rotary
from qengine_kernels.testing import KernelMismatch, assert_close, readable_id

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    half = angle.shape[1]
    pairs = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :].double()], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=readable_id)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"), [(3, 1, 64, 64), (9, 3, 80, 32), (20, 5, 96, 96), (1, 1, 16, 4)]
)
def test_matches_complex_rotation(
    heads: int, kv_heads: int, dim: int, rotary_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """q and k as views of wider tensors; dimensions beyond rotary_dim stay as they are, bit for bit."""
    q = torch.randn(5, heads + 2, dim).to(dtype).to(device)[:, 1:-1]
    k = torch.randn(5, kv_heads + 2, dim).to(dtype).to(device)[:, 1:-1]
    angle = (torch.rand(5, rotary_dim // 2, dtype=torch.float64) * 100).to(device)
    want = rotated(q, angle), rotated(k, angle)
    rest = q[..., rotary_dim:].clone()
    for rotate in (launch_rotary, rotary_):
        q2, k2 = q.clone(), k.clone()
        rotate(q2, k2, angle.cos().float(), angle.sin().float())
        assert_close("q", q2, want[0], LIMITS[dtype])
        assert_close("k", k2, want[1], LIMITS[dtype])
        assert torch.equal(q2[..., rotary_dim:], rest)


@pytest.mark.gpu
def test_one_fused_tensor_is_rotated_in_place() -> None:
    """q and k share one storage, as layers pass them (the interpreter copies storages and cannot show this)."""
    qkv = torch.randn(7, 5, 64, device="cuda", dtype=torch.float16)
    before, angle = qkv.clone(), torch.rand(7, 32, dtype=torch.float64, device="cuda") * 10
    rotary_(qkv[:, :3], qkv[:, 3:4], angle.cos().float(), angle.sin().float())
    assert_close("qk", qkv[:, :4], rotated(before[:, :4], angle), 1e-3)
    assert torch.equal(qkv[:, 4], before[:, 4])


def test_wrong_rotations_fail(device: torch.device) -> None:
    """Control: the opposite direction and the interleaved style are noticed."""
    q, angle = torch.randn(4, 2, 32, device=device), torch.rand(4, 16, dtype=torch.float64, device=device) * 10
    want = rotated(q, angle)
    k = q.clone()
    launch_rotary(q, k, angle.cos().float(), -angle.sin().float())
    interleaved = rotated(k.unflatten(-1, (16, 2)).mT.flatten(-2), angle)
    for wrong in (q, interleaved):
        with pytest.raises(KernelMismatch):
            assert_close("rotation", wrong, want, LIMITS[torch.bfloat16])
