"""Models trained in bfloat16 that run in float16, as on a T4: what leaves its range on the way comes back.

A CPU stands in for the GPU: float16 is refused there for its speed, not for its arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from greedy_compare import first_clear_difference, greedy
from hf_reference import context
from qengine.layers.activation import LIMIT, GatedActivation
from qengine.layers.linear import Linear
from qengine.layers.moe import ExpertNames, MoESpec, SparseMoE
from qengine.models.blocks import GatedMLP, LayerRules, unscaled
from qengine.models.qwen2_moe import SharedExpertMoE
from qengine.models.settings import DecoderShape
from qengine.runtime import device
from qengine.runtime.engine import Engine
from qengine_kernels.testing import relative_error
from torch_linear import load_leaves
from toy_engine import Run, request, run, toy_engine
from toy_models import llama_config, llama_tensors, make_bytetok, write_model

LARGEST = 65504.0
PROMPTS = [[256, 104, 105], [256, *range(40, 72)], [256, 33]]


def loud_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """TINY whose products of gate and up reach some hundred thousand, and one channel of whose residual stream does;
    all weights are ordinary float16 numbers."""
    tensors = llama_tensors(config)
    for i in range(config["num_hidden_layers"]):
        mlp = f"model.layers.{i}.mlp"
        tensors[f"{mlp}.gate_proj.weight"] *= 20
        tensors[f"{mlp}.up_proj.weight"] *= 3000
        tensors[f"{mlp}.down_proj.weight"] *= 0.002
        tensors[f"{mlp}.down_proj.weight"][7] *= 2000
        # As in real models, the norms all but mute the channel that is this large.
        tensors[f"model.layers.{i}.post_attention_layernorm.weight"][7] = 1e-3
    tensors["model.layers.1.input_layernorm.weight"][7] = 1e-3
    tensors["model.norm.weight"][7] = 1e-3
    return tensors


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = llama_config(dtype="bfloat16")
    tensors = {name: t.bfloat16() for name, t in loud_tensors(config).items()}
    return make_bytetok(write_model(tmp_path_factory.mktemp("loud"), config, tensors))


def served(folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Run]:
    monkeypatch.setattr(device, "choose_dtype", lambda name, stored, info: (dtype, "for this test"))
    engine = toy_engine(folder)
    asked = [request(str(i), prompt, max_tokens=8, logprobs=4) for i, prompt in enumerate(PROMPTS)]
    return engine, run(engine, asked)


def largest_product(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of gate and up, over a prompt."""
    seen: list[float] = []
    real = GatedActivation.__call__

    def watching(self: GatedActivation, x: torch.Tensor) -> torch.Tensor:
        y = real(self, x)
        seen.append(float(y.abs().max()))
        return y

    monkeypatch.setattr(GatedActivation, "__call__", watching)
    run(engine, [request("again", PROMPTS[1], max_tokens=1)])
    return max(seen)


def test_float16_says_what_float32_says(loud: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, exact = served(loud, torch.float32, monkeypatch)
    assert largest_product(engine, monkeypatch) > 2 * LARGEST, "the toy does leave float16"
    monkeypatch.undo()
    _, half = served(loud, torch.float16, monkeypatch)
    assert all(out.error is None for out in half.last.values())
    assert half.ids == exact.ids


@pytest.mark.gpu
def test_float16_on_a_gpu_says_what_float32_says(loud: Path) -> None:
    exact = greedy(toy_engine(loud), PROMPTS, 8)
    half = greedy(toy_engine(loud, device="cuda", dtype="half"), PROMPTS, 8)
    assert not any(first_clear_difference(a, b, 0.25) for a, b in zip(exact, half, strict=True))


def naive(self: GatedMLP, x: torch.Tensor) -> torch.Tensor:
    return self.down(self.activation(self.gate_up(x)))


def test_naive_float16_is_infinite(loud: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the same model without the scales. Its requests end with an error and not with "!!!!"."""
    monkeypatch.setattr(GatedMLP, "__call__", naive)
    _, half = served(loud, torch.float16, monkeypatch)
    assert all(out.finish_reason == "error" and "not finite" in str(out.error) for out in half.last.values())


def test_a_residual_in_float16_is_infinite(loud: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: scaled products alone are not enough, the stream that they are added to has to be float32."""
    monkeypatch.setattr(device, "residual_dtype", lambda dtype, info: dtype)
    _, half = served(loud, torch.float16, monkeypatch)
    assert all(out.finish_reason == "error" for out in half.last.values())


def half_context() -> Any:
    ctx = context(None)
    ctx.dtype = torch.float16
    return ctx


SHAPE = DecoderShape(
    vocab_size=8, hidden_size=48, intermediate_size=80, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=24,
    norm_eps=1e-5, activation="silu",
)  # fmt: skip


def weights(loudness: float, seed: int = 0) -> Callable[..., torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return lambda *shape: (torch.randn(*shape, generator=gen) * loudness / shape[-1] ** 0.5).half()


def inputs(rows: int) -> torch.Tensor:
    return torch.randn(rows, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1)).half()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_feed_forward(kind: str, bias: bool) -> None:
    """Loud rows and quiet ones in one batch; with biases, which must not be scaled."""
    ctx, w = half_context(), weights(1.0)
    shape = DecoderShape(**{**vars(SHAPE), "activation": kind})
    mlp = GatedMLP(ctx, "mlp", shape, LayerRules(mlp_bias=bias))
    h, i = SHAPE.hidden_size, SHAPE.intermediate_size
    state = {"mlp.gate_proj.weight": w(i, h) * 30, "mlp.up_proj.weight": w(i, h) * 3000}
    state["mlp.down_proj.weight"] = w(h, i)
    if bias:
        state |= {"mlp.gate_proj.bias": w(i), "mlp.up_proj.bias": w(i), "mlp.down_proj.bias": w(h) * 10}
    load_leaves(ctx.leaves, state)
    x = inputs(6)
    x[::2] *= 1e-3
    f = {name: t.float() for name, t in state.items()}
    gate, up = (
        functional.linear(x.float(), f[f"mlp.{n}_proj.weight"], f.get(f"mlp.{n}_proj.bias")) for n in ("gate", "up")
    )
    act = {"silu": functional.silu, "relu": functional.relu, "gelu": functional.gelu}.get(
        kind, lambda t: functional.gelu(t, approximate="tanh")
    )
    inner = act(gate) * up
    want = functional.linear(inner, f["mlp.down_proj.weight"], f.get("mlp.down_proj.bias"))
    got = mlp(x)
    assert inner.abs().max() > 2 * LARGEST and got.dtype is torch.float32
    for row in range(len(x)):
        assert relative_error(got[row], want[row]) < 5e-3, row
    assert not torch.isfinite(naive(mlp, x)[1::2]).all(), "control"


def test_scaled_rows_and_their_limit() -> None:
    x = torch.tensor([[256.0, 256.0], [2.0, 3.0]], dtype=torch.float16)
    y, scale = GatedActivation("relu").scaled(x)
    assert y.flatten().tolist() == [64.0, 6.0] and scale.flatten().tolist() == [1024.0, 1.0]
    assert y.abs().max() <= LIMIT


def test_a_bias_is_added_once() -> None:
    ctx = half_context()
    linear = Linear(ctx, "down", 4, 2, bias=True)
    load_leaves(ctx.leaves, {"down.weight": torch.ones(2, 4).half(), "down.bias": torch.tensor([100.0, -7.0]).half()})
    y = unscaled(linear, torch.ones(1, 4).half(), torch.tensor([[1024.0]]))
    assert y.tolist() == [[4 * 1024 + 100.0, 4 * 1024 - 7.0]]


@pytest.mark.parametrize("shared", [False, True])
def test_experts(shared: bool) -> None:
    """One by one on a CPU; the sum over a token's experts is float32 too, and what a shared expert adds."""
    ctx, w = half_context(), weights(1.0, seed=3)
    spec = MoESpec(4, 2, SHAPE.hidden_size, SHAPE.intermediate_size, "silu", True)
    h, i = SHAPE.hidden_size, SHAPE.intermediate_size
    names = ExpertNames()
    moe = SharedExpertMoE(ctx, "mlp", spec, SHAPE) if shared else SparseMoE(ctx, "mlp", spec, names)
    state = {"mlp.gate.weight": w(4, h)}
    places = [f"mlp.experts.{e}" for e in range(4)]
    if shared:
        state["mlp.shared_expert_gate.weight"] = w(1, h)
        places.append("mlp.shared_expert")
    for place in places:
        state |= {f"{place}.gate_proj.weight": w(i, h) * 30, f"{place}.up_proj.weight": w(i, h) * 3000}
        state[f"{place}.down_proj.weight"] = w(h, i)
    load_leaves(ctx.leaves, state)
    f = {name: t.float() for name, t in state.items()}

    def expert(place: str, x: torch.Tensor) -> torch.Tensor:
        inner = functional.silu(x @ f[f"{place}.gate_proj.weight"].T) * (x @ f[f"{place}.up_proj.weight"].T)
        return inner @ f[f"{place}.down_proj.weight"].T

    x = inputs(5)
    got = moe(x)
    assert got.dtype is torch.float32 and got.abs().max() > LARGEST
    for row, y in zip(x.float(), got, strict=True):
        probabilities = (row @ f["mlp.gate.weight"].T).softmax(-1)
        best = probabilities.topk(2)
        want = sum(
            p / best.values.sum() * expert(places[e], row[None])[0]
            for p, e in zip(best.values, best.indices.tolist(), strict=True)
        )
        if shared:
            want = want + torch.sigmoid(row @ f["mlp.shared_expert_gate.weight"].T) * expert(places[4], row[None])[0]
        assert isinstance(want, torch.Tensor) and relative_error(y, want) < 5e-3


def test_other_dtypes_are_left_alone() -> None:
    """bfloat16 has float32's range: nothing is scaled, and what comes out is 16 bits wide as before."""
    ctx = context(None)
    ctx.dtype = torch.bfloat16
    mlp = GatedMLP(ctx, "mlp", SHAPE, LayerRules())
    h, i = SHAPE.hidden_size, SHAPE.intermediate_size
    w = weights(1.0)
    names = ("gate_proj", "up_proj", "down_proj")
    shapes = ((i, h), (i, h), (h, i))
    load_leaves(
        ctx.leaves, {f"mlp.{n}.weight": w(*shape).bfloat16() for n, shape in zip(names, shapes, strict=True)}
    )
    x = inputs(3).bfloat16()
    assert mlp(x).dtype is torch.bfloat16 and torch.equal(mlp(x), naive(mlp, x))
