"""Short prompts from CUDA graphs: which are captured, what they cost, and that replaying them changes nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from greedy_compare import first_clear_difference, greedy
from qengine.layers.attention import DeviceLengths
from qengine.plugin import KVLayout
from qengine.plugin.discovery import load_plugin
from qengine.runtime import graphs, prompt_graphs
from qengine.runtime.graph_check import check_graphs
from qengine.runtime.graphs import GRAPH_BYTES
from qengine.runtime.inputs import StepInputs
from qengine.runtime.prompt_graphs import LADDER, prompt_graph_bytes, prompt_sizes
from qengine.runtime.runner import Runner
from qengine_kernels.paged_attention import TritonPagedKV
from qengine_kernels.testing import poisoned_empty, relative_error
from toy_engine import Run, request, run, toy_engine
from toy_models import make_tiny

SIZE, BLOCK, SEQS = 32, 16, 4


def test_sizes_and_bytes() -> None:
    assert prompt_sizes(8192) == list(LADDER) and prompt_sizes(100) == [32, 64] and prompt_sizes(8) == []
    assert prompt_graph_bytes(100, hidden=64, itemsize=2) == 64 * 64 * 2 + 2 * GRAPH_BYTES
    assert prompt_graph_bytes(8, 64, 2) == 0


def triton_cache(spec: Any, storage: torch.Tensor) -> TritonPagedKV:
    plugin = load_plugin("kv", "auto")
    k, v = plugin(spec, "k", torch.float32), plugin(spec, "v", torch.float32)
    layout = KVLayout.of(BLOCK, k.layout(BLOCK), v.layout(BLOCK))
    scales = torch.ones(spec.num_kv_heads)
    return TritonPagedKV(storage, layout, spec, scales, scales, k.functions(), v.functions(), False, torch.float32)


def use_graphs_of_the_interpreter(runner: Runner, patch: pytest.MonkeyPatch) -> None:
    """Steps are replayed as on a GPU, but that a replay is the forward pass that would have been captured. Attention
    runs the kernels that GPUs run."""
    for layer, storage in zip(runner.model.attention, runner.cache.storage, strict=True):
        layer.cache = triton_cache(layer.spec, storage)
        assert isinstance(layer.cache, DeviceLengths) and layer.cache.prompts_by_device_lengths
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    for module in (graphs, prompt_graphs):
        patch.setattr(module, "captured", lambda forward, pool: SimpleNamespace(replay=forward))
    decodes, line = graphs.capture_decodes(runner.model, SEQS, 256, 1, BLOCK, runner.device)
    assert decodes is not None and "1 to 4 sequences, 3 sizes" in line
    runner.prompt_graphs, line = prompt_graphs.capture_prompts(runner.model, SIZE, decodes, None)
    assert runner.prompt_graphs is not None and "up to 32 tokens in up to 4 sequences" in line
    runner.use_graphs(decodes)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_tiny(tmp_path_factory.mktemp("tiny"), **small)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter; a GPU runs the test below")
def test_a_padded_step_computes_what_its_own_tokens_give(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, chunks of them, decodes and mixtures, replayed in turn over the same block tables: tokens and sequences
    that only pad a step are neither read nor written, whatever their own values are."""
    engine = toy_engine(tiny, block_size=BLOCK, max_num_batched_tokens=48, max_num_seqs=6, async_scheduling=True)
    runner, model = engine.runner, engine.runner.model
    use_graphs_of_the_interpreter(runner, monkeypatch)
    replayed: list[tuple[str, list[int]]] = []

    def compared(kind: str, real: Any) -> Any:
        def both(inputs: StepInputs) -> Any:
            with poisoned_empty():
                got = real(inputs)
            if got is None:
                return None
            replayed.append((kind, inputs.batch.host_query_lens))
            if kind == "prompt" or len(replayed) == 2:  # not all decodes: eager steps take long here
                hidden = model.forward(inputs.token_ids, inputs.batch)
                assert relative_error(got, hidden) < 1e-5
            return got

        return both

    for kind, one in (("decode", runner.graphs), ("prompt", runner.prompt_graphs)):
        monkeypatch.setattr(one, "run", compared(kind, one.run))  # type: ignore[union-attr]
    gen = torch.Generator().manual_seed(3)
    lengths = {"long": (40, 2), "a": (2, 3), "b": (3, 3), "c": (4, 3), "late": (20, 8), "tail": (6, 2)}
    asked = {
        name: request(name, torch.randint(0, 250, (n,), generator=gen).tolist(), max_tokens=new, ignore_eos=True)
        for name, (n, new) in lengths.items()
    }
    found = Run(engine)

    def add(*names: str) -> None:
        for name in names:
            engine.add(asked[name])
        found.step()

    add("long")
    while engine.has_work:
        found.step()
    assert not any(kind == "prompt" for kind, _ in replayed), "40 tokens are too many"
    add("a", "b", "c")
    found.step()
    add("late")
    while engine.stats().num_running > 1:
        found.step()
    add("tail")  # fewer sequences and tokens than before, in front of what they have left in the buffers
    while engine.has_work:
        found.step()
    assert [lens for kind, lens in replayed if kind == "prompt"] == [[2, 3, 4], [1, 1, 1, 20], [1, 6]]
    assert replayed[-1][0] == "decode"
    assert found.ids == run(toy_engine(tiny, block_size=BLOCK), list(asked.values())).ids


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter; a GPU compares real graphs")
def test_graphs_that_give_other_values_are_not_used(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine(tiny, block_size=BLOCK, max_num_seqs=SEQS)
    runner = engine.runner
    use_graphs_of_the_interpreter(runner, monkeypatch)
    decodes, prompts = runner.graphs, runner.prompt_graphs
    assert decodes is not None and prompts is not None
    [line] = check_graphs(runner, 255)
    assert line == "CUDA graphs: 4 replayed beside the same kernels run one by one, 0 apart at most"
    assert (runner.graphs, runner.prompt_graphs) == (decodes, prompts) and runner.inputs.rows == {}
    assert not any(bool(t.any()) for t in runner.cache.storage), "blocks are zero again"

    def older_inputs() -> None:
        prompts.token_ids.fill_(7)
        prompts.forward(SIZE)

    def nothing_recorded() -> None:
        pass

    prompts._captured[SIZE] = SimpleNamespace(replay=older_inputs)  # type: ignore[assignment]
    [line, _] = check_graphs(runner, 255)
    assert line.startswith("WARNING: CUDA graphs: none for prompts, because a replayed step of 32 gives values that")
    assert runner.prompt_graphs is None and runner.graphs is decodes and runner.inputs.fixed_rows == SEQS
    decodes._captured[2] = SimpleNamespace(replay=nothing_recorded)  # type: ignore[assignment]
    runner.prompt_graphs = prompts
    [line] = check_graphs(runner, 255)
    assert "none for decodes, because a replayed step of 2 gives values that are 1 apart" in line
    assert runner.graphs is None and runner.prompt_graphs is None and runner.inputs.fixed_rows == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_replayed_prompts_are_eager_ones(tmp_path: Path, kv: str) -> None:
    options = {"device": "cuda", "dtype": "half", "kv_cache_dtype": kv, "kv_cache_memory_bytes": 16 << 20}
    folder = make_tiny(tmp_path)
    gen = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 250, (n,), generator=gen).tolist() for n in (1, 5, 31, 40, 50, 130, 400)]
    eager = toy_engine(folder, enforce_eager=True, **options)
    want = [greedy(eager, [p], 8)[0] for p in prompts]
    engine = toy_engine(folder, **options)
    assert any("replayed beside the same kernels" in line for line in engine.facts.report), engine.facts.report
    prompts_replayed = engine.runner.prompt_graphs
    assert prompts_replayed is not None and engine.runner.graphs is not None
    replayed: list[Any] = []
    real = prompts_replayed.run
    prompts_replayed.run = lambda inputs: replayed.append(real(inputs)) or replayed[-1]  # type: ignore[method-assign]
    batches = [range(6), *([i] for i in range(7)), range(7)]  # smaller steps behind larger ones, and cached prefixes
    for batch in batches:
        before = len([r for r in replayed if r is not None])
        found = greedy(engine, [prompts[i] for i in batch], 8)
        differences = [first_clear_difference(want[i], text, 0.1) for i, text in zip(batch, found, strict=True)]
        assert not any(differences), differences
        alone = list(batch) == [0]  # one token is a decode, also where it is all that is not cached
        assert alone or len([r for r in replayed if r is not None]) > before
