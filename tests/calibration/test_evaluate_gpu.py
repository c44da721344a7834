"""An evaluation across devices: the CPU in float32 beside a GPU in 16 bits, and what fp8 KV costs there."""

from __future__ import annotations

from pathlib import Path

import pytest

from qengine.config import EngineConfig
from qengine_calibration.eval_text import TextSource
from qengine_calibration.evaluate import evaluate
from toy_models import make_tiny

pytestmark = pytest.mark.gpu


def mean_kl(a: EngineConfig, b: EngineConfig) -> float:
    e = evaluate([a, b], TextSource.open(None), max_tokens=2000, window=256)
    assert e.kl is not None and e.memory["engines_at_once"] == 2
    return float(e.kl.mean())


def test_a_gpu_beside_the_cpu(tmp_path: Path) -> None:
    make_tiny(tmp_path)

    def config(device: str, dtype: str, kv: str = "auto") -> EngineConfig:
        return EngineConfig(
            model=str(tmp_path), tokenizer=str(tmp_path), device=device, dtype=dtype, kv_cache_dtype=kv,
            max_num_batched_tokens=100,
        )  # fmt: skip

    gpu = config("cuda", "half")
    assert mean_kl(gpu, gpu) == 0
    assert mean_kl(config("cpu", "float32"), gpu) < 1e-5
    # The same loss on both devices: K/V are rounded to the same 256 values.
    on_gpu = mean_kl(gpu, config("cuda", "half", "fp8"))
    on_cpu = mean_kl(config("cpu", "float32"), config("cpu", "float32", "fp8"))
    assert 1e-4 < on_gpu < 2 * on_cpu < 4 * on_gpu
