"""The demo model with AWQ weights and an fp8 cache through the Triton kernels, beside the CPU's float32 engine."""

import pytest

from greedy_compare import first_clear_difference, forced, greedy
from qengine import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MARGINS = {"half": 0.7, "bfloat16": 1.0}
"""Natural log: the likeliest token is about twice as likely as the next. Below that, K and V that fall on the other
side of an fp8 rounding step, and bfloat16 logits with a spacing of 0.125 to 0.25, can decide."""
QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three colours.",
    "What is 2 + 2?",
    "Explain in one sentence why the sky is blue.",
    "Who wrote Romeo and Juliet?",
]


@pytest.mark.parametrize("dtype", list(MARGINS))
def test_demo_text_is_the_cpus_where_the_margin_is_clear(dtype: str) -> None:
    options = {"quantization": "awq", "kv_cache_dtype": "fp8", "max_model_len": 1024}
    cpu = LLM(device="cpu", dtype="float32", kv_cache_memory_bytes=64 << 20, **options)
    gpu = LLM(device="cuda", dtype=dtype, kv_cache_memory_bytes=64 << 20, **options)
    prompts = [
        cpu.inputs.encode(cpu.inputs.chat_text([{"role": "user", "content": q}]), add_special_tokens=False)
        for q in QUESTIONS
    ]
    reference, found = greedy(cpu.engine, prompts, 32), greedy(gpu.engine, prompts, 32)
    differences = [first_clear_difference(a, b, MARGINS[dtype]) for a, b in zip(reference, found, strict=True)]
    assert not any(differences), differences
    # Greedy texts are other texts after a first near tie; given the reference's own text, every position counts.
    rated = forced(gpu.engine, prompts, reference)
    pairs = [(a, b) for r, f in zip(reference, rated, strict=True) for a, b in zip(r, f, strict=True)]
    clear = [(a, b) for a, b in pairs if a.top_logprobs[0] - a.top_logprobs[1] > MARGINS[dtype]]
    assert len(pairs) == 32 * len(QUESTIONS) and len(clear) > 0.5 * len(pairs)
    assert [(a, b) for a, b in clear if b.rank != 1] == []
