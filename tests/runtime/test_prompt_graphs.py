"""Short prompts from CUDA graphs: which are captured, what they cost, and that replaying them changes nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from greedy_compare import first_clear_difference, greedy
from qengine.layers.attention import DeviceLengths
from qengine.plugin import KVLayout, KVScales
from qengine.plugin.discovery import load_plugin
from qengine.runtime.graphs import GRAPH_BYTES
from qengine.runtime.inputs import StepInputs
from qengine.runtime.prompt_graphs import LADDER, SEQUENCES, PromptGraphs, prompt_graph_bytes, prompt_sizes
from qengine_kernels.paged_attention import TritonPagedKV
from qengine_kernels.testing import relative_error
from toy_engine import request, run, toy_engine
from toy_models import make_tiny

SIZE, BLOCK = 32, 16


def test_sizes_and_bytes() -> None:
    assert prompt_sizes(8192) == list(LADDER) and prompt_sizes(100) == [32, 64] and prompt_sizes(8) == []
    buffers = 64 * 64 * 2 + 4 * SEQUENCES * 1000
    assert prompt_graph_bytes(100, hidden=64, vocab=1000, itemsize=2) == buffers + 2 * GRAPH_BYTES
    assert prompt_graph_bytes(8, 64, 1000, 2) == 0


def triton_cache(spec: Any, blocks: int) -> TritonPagedKV:
    plugin = load_plugin("kv", "auto")
    k, v = plugin(spec, "k", torch.float32), plugin(spec, "v", torch.float32)
    layout = KVLayout.of(BLOCK, k.layout(BLOCK), v.layout(BLOCK))
    scales = KVScales(torch.ones(spec.num_kv_heads), torch.ones(spec.num_kv_heads))
    storage = torch.zeros(blocks, layout.block_bytes, dtype=torch.uint8)
    functions = k.functions(), v.functions()
    return TritonPagedKV(storage, layout, spec, scales.k, scales.v, *functions, False, torch.float32)


def uncaptured(model: Any) -> PromptGraphs:
    """Graphs whose replay is the forward pass that would have been captured, over the same buffers."""
    tables = [torch.zeros(4, 16, dtype=torch.int32)]
    hidden = torch.zeros(1, model.hidden_size)
    decodes: Any = SimpleNamespace(tables=tables, hidden=hidden, rows=4, max_len=256, block_size=BLOCK)
    graphs = PromptGraphs(model, [SIZE], decodes, None)
    graphs._captured = {SIZE: SimpleNamespace(replay=lambda: graphs.forward(SIZE))}  # type: ignore[dict-item]
    return graphs


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter; a GPU runs the test below")
def test_a_padded_step_computes_what_its_own_tokens_give(tmp_path: Path) -> None:
    """Prompts, chunks of them and decodes, in the kernels that GPUs run: tokens and sequences that only pad a step are
    neither read nor written."""
    engine = toy_engine(make_tiny(tmp_path), block_size=BLOCK, max_num_batched_tokens=48, max_num_seqs=6)
    runner, model = engine.runner, engine.runner.model
    for layer in model.attention:
        layer.cache = triton_cache(layer.spec, engine.stats().kv_blocks_total + 1)
        assert isinstance(layer.cache, DeviceLengths) and layer.cache.prompts_by_device_lengths
    with torch.inference_mode():
        graphs = uncaptured(model)
    steps: list[list[int] | None] = []

    def both(inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor] | None:
        got = graphs.run(inputs)
        steps.append(None if got is None else inputs.batch.host_query_lens)
        if got is not None:
            hidden = model.forward(inputs.token_ids, inputs.batch)
            assert relative_error(got[0], hidden) < 1e-5
            if len(inputs.sample_rows):
                assert relative_error(got[1], model.logits(hidden[inputs.sample_rows])) < 1e-5
        return got

    runner.prompt_graphs = SimpleNamespace(run=both)  # type: ignore[assignment]
    gen = torch.Generator().manual_seed(3)
    lengths = {"short": 5, "chunked": 50, "late": 20}
    prompts = {name: torch.randint(0, 250, (n,), generator=gen).tolist() for name, n in lengths.items()}
    run(engine, [request(name, prompt, max_tokens=3) for name, prompt in prompts.items()])
    replayed = [lens for lens in steps if lens is not None]
    assert None in steps, "a step of 48 tokens is too large"
    assert any(max(lens) > 1 and len(lens) > 1 for lens in replayed) and any(max(lens) == 1 for lens in replayed)
    with torch.inference_mode():
        before = graphs.hidden[:1].clone()
        graphs.seq_lens[0] -= 1
        graphs.forward(SIZE)
        assert relative_error(graphs.hidden[:1], before) > 1e-3, "control: one cached token fewer"


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_replayed_prompts_are_eager_ones(tmp_path: Path, kv: str) -> None:
    options = {"device": "cuda", "dtype": "half", "kv_cache_dtype": kv, "kv_cache_memory_bytes": 16 << 20}
    folder = make_tiny(tmp_path)
    gen = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 250, (n,), generator=gen).tolist() for n in (1, 5, 31, 32, 33, 130, 400)]
    want = [greedy(toy_engine(folder, enforce_eager=True, **options), [p], 8)[0] for p in prompts]
    engine = toy_engine(folder, **options)
    graphs = engine.runner.prompt_graphs
    assert graphs is not None
    replayed = []
    real = graphs.run
    graphs.run = lambda inputs: replayed.append(real(inputs)) or replayed[-1]  # type: ignore[method-assign]
    found = [greedy(engine, [p], 8)[0] for p in prompts]
    found_together = greedy(engine, prompts, 8)
    assert len([r for r in replayed if r is not None]) >= len(prompts)
    for texts in (found, found_together):
        differences = [first_clear_difference(a, b, 0.1) for a, b in zip(want, texts, strict=True)]
        assert not any(differences), differences
