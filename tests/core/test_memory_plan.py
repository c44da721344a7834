"""The planner: what fits, what is refused, and with which numbers."""

import dataclasses

import pytest

from qengine.core.memory import (
    ActivationShape,
    activation_bytes,
    format_bytes,
    group_layers,
    most_tokens,
    storage_bytes,
)
from qengine.core.plan import PlanInput, shrunk
from qengine.core.refusal import plan
from qengine.core.step import KVGroupSpec, blocks_for
from qengine.errors import CapacityError

MIB, GIB = 2**20, 2**30


def activations(nbytes: int, per_token: int = 0) -> ActivationShape:
    """A shape whose activations are `per_token` bytes a token (a multiple of 8) and `nbytes` on top."""
    return ActivationShape(per_token // 8, 0, 0, 0, 0, 0, itemsize=1, residual_itemsize=3, workspace=nbytes)


def tiny(token_bytes: int = 1024, **changes: object) -> PlanInput:
    """The 2-layer test model: 1024 bytes of KV a token in 16 bits, half of it in fp8, a pool of 1 MiB."""
    values: dict[str, object] = {
        "total": GIB,
        "free": GIB,
        "weights": {"16-bit": 4 * MIB},
        "shape": activations(MIB),
        "logit_rows": 4,
        "groups": [KVGroupSpec(None, [0, 1])],
        "block_bytes": token_bytes * 16,
        "block_size": 16,
        "max_chunk": 512,
        "model_max_len": 131072,
        "kv_cache_memory_bytes": MIB,
        "alternatives": {"fp8": 512 * 16} if token_bytes > 512 else {},
    }
    return PlanInput(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("token_bytes", "blocks", "tokens"), [(1024, 64, 1024), (512, 128, 2048)])
def test_capacity_doubles_in_fp8(token_bytes: int, blocks: int, tokens: int) -> None:
    result = plan(tiny(token_bytes))
    assert result.num_usable_blocks == blocks
    assert result.num_blocks == blocks + 1, "the null block comes on top"
    assert result.null_block_bytes == token_bytes * 16
    assert result.kv_tokens == result.max_model_len == tokens
    assert result.kv_bytes == MIB
    assert result.concurrency(tokens // 4) == 4.0
    assert f"Maximum concurrency for {tokens:,} tokens per request: 1.00x" in result.lines()


def test_too_long_shows_both_sides_and_the_alternative() -> None:
    with pytest.raises(CapacityError) as error:
        plan(tiny(max_model_len=4096, free=8 * MIB))
    for part in ("1024 tokens", "1048576 bytes", "4096 tokens", "4194304 bytes", "fp8 holds only 2048 tokens"):
        assert part in str(error.value)
    assert "--max-model-len 1024" in str(error.value.hint)


def test_the_change_that_fits_is_named() -> None:
    with pytest.raises(CapacityError) as error:
        plan(tiny(max_model_len=1500))
    assert error.value.hint == "--kv-dtype fp8 (holds 2048 tokens)"
    with pytest.raises(CapacityError) as error:
        plan(tiny(512, max_model_len=4096))
    assert error.value.hint == f"--kv-cache-memory-bytes {2 * MIB}"
    assert plan(tiny(512, max_model_len=4096, kv_cache_memory_bytes=2 * MIB)).max_model_len == 4096


def test_length_is_capped_by_the_model() -> None:
    assert plan(tiny(model_max_len=512)).max_model_len == 512
    with pytest.raises(CapacityError, match="have: 2048 tokens; need: at most 512"):
        plan(tiny(model_max_len=512, max_model_len=2048))


def test_budget_is_the_smaller_of_share_and_free_less_reserve() -> None:
    neighbour = tiny(total=15 * GIB, free=6 * GIB, reserve=GIB, kv_cache_memory_bytes=None, utilization=0.9)
    assert neighbour.budget == 5 * GIB
    assert neighbour.others == 9 * GIB
    alone = dataclasses.replace(neighbour, free=15 * GIB)
    assert alone.budget == int(0.9 * 15 * GIB)
    result = plan(neighbour)
    assert result.planned <= neighbour.budget < result.planned + neighbour.block_bytes
    assert sum(size for name, size in result.items()[5:]) == result.planned


def test_no_room_names_one_change() -> None:
    big = {"16-bit": 900 * MIB}
    with pytest.raises(CapacityError) as error:
        plan(tiny(weights=big, kv_cache_memory_bytes=None, utilization=0.5))
    assert error.value.hint == "--gpu-memory-utilization 0.88"
    assert plan(tiny(weights=big, kv_cache_memory_bytes=None, utilization=0.88)).num_usable_blocks > 0
    large = tiny(weights=big, shape=activations(0, 400 * 1024), kv_cache_memory_bytes=None, utilization=1.0)
    with pytest.raises(CapacityError, match="--max-num-batched-tokens") as error:
        plan(large)
    most = error.value.changes["max_num_batched_tokens"]
    assert isinstance(most, int) and 0 < most < 512
    plan(dataclasses.replace(large, max_chunk=most))
    with pytest.raises(CapacityError):
        plan(dataclasses.replace(large, max_chunk=most + 1))
    with pytest.raises(CapacityError, match=r"a device with 2\.\d+ GiB, or smaller weights") as error:
        plan(tiny(weights={"16-bit": 2 * GIB}, kv_cache_memory_bytes=None))
    assert not error.value.changes
    beside = tiny(weights={"16-bit": GIB // 2}, free=GIB // 4, kv_cache_memory_bytes=None)
    with pytest.raises(CapacityError, match=r"25\d\.\d+ MiB more free memory \(others use 768\.00 MiB\)"):
        plan(beside)


def test_neighbours_are_named_when_something_is_refused() -> None:
    """CASES C19 on a planner: 15 GiB, of which 6 are free, and a share of 0.9 asked for."""
    asked: list[int] = []

    def neighbours() -> list[str]:
        asked.append(1)
        return ["trainer (pid 4711) 9.00 GiB"]

    place: dict[str, object] = {"total": 15 * GIB, "free": 6 * GIB, "utilization": 0.9, "kv_cache_memory_bytes": None}
    assert plan(tiny(**place, neighbours=neighbours)).planned <= 6 * GIB
    assert not asked, "nobody is looked for while everything fits"
    with pytest.raises(CapacityError) as error:
        plan(tiny(**place, weights={"16-bit": 8 * GIB}, neighbours=neighbours))
    for part in ("total 15.00 GiB", "free 6.00 GiB", "share of 0.9", "trainer (pid 4711) 9.00 GiB"):
        assert part in str(error.value)


@pytest.mark.parametrize("grown", [0, 128 * MIB, GIB // 2])
def test_a_neighbour_that_grows_meanwhile_shrinks_the_cache(grown: int) -> None:
    planned = plan(tiny(kv_cache_memory_bytes=None, utilization=0.9))
    room = planned.kv_bytes + planned.null_block_bytes + planned.inputs.activations - grown
    smaller = shrunk(planned, room)
    assert smaller is not None
    assert smaller.kv_bytes + smaller.null_block_bytes + planned.inputs.activations <= room
    assert planned.kv_bytes - smaller.kv_bytes - grown < planned.inputs.block_bytes
    assert smaller.max_model_len <= planned.max_model_len


def test_a_length_asked_for_is_never_cut() -> None:
    planned = plan(tiny(kv_cache_memory_bytes=None, max_model_len=1024))
    least = planned.inputs.activations + 65 * planned.inputs.block_bytes
    found = shrunk(planned, least)
    assert found is not None and found.max_model_len == 1024
    assert shrunk(planned, least - 1) is None


def test_claimed_cache_must_be_free() -> None:
    with pytest.raises(CapacityError) as error:
        plan(tiny(kv_cache_memory_bytes=2 * GIB))
    hint = str(error.value.hint)
    assert hint.startswith("--kv-cache-memory-bytes ")
    assert plan(tiny(kv_cache_memory_bytes=int(hint.split()[-1]))).num_usable_blocks > 0
    with pytest.raises(CapacityError, match="the KV cache is too small"):
        plan(tiny(kv_cache_memory_bytes=1000))


def test_groups_of_equal_size() -> None:
    assert group_layers([None] * 3) == [KVGroupSpec(None, [0, 1, 2])]
    assert group_layers([7, None, 7, None]) == [KVGroupSpec(7, [0, 2]), KVGroupSpec(None, [1, 3])]
    gemma3 = [None if (i + 1) % 6 == 0 else 512 for i in range(26)]
    groups = group_layers(gemma3)
    assert [len(g.layers) for g in groups] == [4, 4, 4, 4, 4, 2, 4]
    assert sorted(layer for g in groups for layer in g.layers) == list(range(26))
    assert all(gemma3[layer] == g.window for g in groups for layer in g.layers)
    nearly = group_layers([None] * 10 + [64] * 12)
    assert [len(g.layers) for g in nearly] == [10, 12], "two unused slots instead of eight"


def test_storage_holds_the_largest_layer_of_each_slot() -> None:
    groups = [KVGroupSpec(None, [0, 2]), KVGroupSpec(8, [1])]
    assert storage_bytes(groups, [100, 300, 200]) == [300, 200]


def worst_case(group: KVGroupSpec, block_size: int, max_chunk: int) -> int:
    """Most blocks between the first that a chunk's first token sees and the chunk's last, by trying."""
    return max(
        (start + n - 1) // block_size - group.first_block(start, block_size) + 1
        for start in range(100, 100 + block_size)
        for n in range(1, max_chunk + 1)
    )


@pytest.mark.parametrize("window", [1, 2, 4, 5, 13])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_sliding_window_needs_its_span_and_no_more(window: int, chunk: int) -> None:
    group = KVGroupSpec(window, [0])
    assert group.max_blocks(1000, 4, chunk) == worst_case(group, 4, chunk)
    assert group.max_blocks(3, 4, chunk) == 1


def test_longest_sequence_of_a_mixed_model() -> None:
    full, window = KVGroupSpec(None, [0]), KVGroupSpec(100, [1])
    worst = worst_case(window, 16, 32)
    assert most_tokens([full], 64, 16, 512, 9999) == 1024
    assert most_tokens([window], worst, 16, 32, 9999) == 9999
    assert most_tokens([full, window], 64 + worst, 16, 32, 9999) == 1024
    assert blocks_for([full, window], 1024, 16, 32) == 64 + worst


def test_tokens_of_a_mixed_model_count_windows_once() -> None:
    groups = [KVGroupSpec(None, [0]), KVGroupSpec(64, [1])]
    result = plan(tiny(groups=groups, block_bytes=8192, max_model_len=1024, model_max_len=1024, max_chunk=64))
    per_request = 64 + 9
    assert result.num_usable_blocks == 128
    assert result.concurrency(1024) == 128 / per_request
    assert result.kv_tokens == 128 * 1024 // per_request


def test_activation_peak_is_the_largest_phase() -> None:
    shape = ActivationShape(256, 512, 320, 4, 2, 64, itemsize=2, residual_itemsize=4)
    mlp = 512 * (256 * 8 + 3 * 512 * 2 + 256 * 4)
    assert activation_bytes(shape, 512, 4) == mlp
    assert activation_bytes(dataclasses.replace(shape, vocab=100_000), 512, 64) == 512 * 256 * 8 + 64 * 100_000 * 22
    assert activation_bytes(dataclasses.replace(shape, workspace=77), 512, 4) == mlp + 77


def test_bytes_are_readable() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 * GIB)] == ["0 B", "1023 B", "1.50 KiB", "3.00 GiB"]
