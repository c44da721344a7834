"""Blocks go to host memory and come back bit by bit, whatever their bytes mean."""

from __future__ import annotations

import pytest
import torch

from qengine.core import host_tier
from qengine.core.host_tier import stage_bytes, stage_rows
from qengine.runtime.kv_host import HostBlocks

WIDTHS = {"words": (96, 40, 512), "odd": (7, 96, 33), "one": (64,)}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def storage(widths: tuple[int, ...], blocks: int, device: str) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (blocks, w), generator=gen, dtype=torch.uint8).to(device) for w in widths]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
def test_blocks_come_back_bit_equal(widths: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "STAGE_BYTES", 3 * sum(widths))  # several buffers full in one call
    store = storage(widths, 20, device)
    before = [t.clone() for t in store]
    host = HostBlocks(store, 12)
    assert host.nbytes == 12 * sum(widths) == host.memory.numel() * host.memory.element_size()
    out = list(zip(range(1, 9), (5, 1, 12, 2, 3, 9, 10, 11), strict=True))
    host.copy_out(out)
    for t in store:
        t.fill_(0)  # the next owner writes at once
    back = {host_block: block + 10 for block, host_block in out}
    host.copy_in(list(back.items()))
    for t, was in zip(store, before, strict=True):
        for block, host_block in out:
            assert torch.equal(t[back[host_block]], was[block])
            assert not torch.equal(t[back[host_block]], was[block + 1]), "control: blocks differ"
        assert not t[:11].any()


@pytest.mark.parametrize(
    ("device", "late"),
    [("cpu", ""), *(pytest.param("cuda", late, marks=pytest.mark.gpu) for late in ("", "compute", "out", "back"))],
)
def test_a_host_block_is_used_again_and_again(device: str, late: str) -> None:
    """Each round writes what the round before read, through both directions' buffers. On a GPU also with one of the
    streams some milliseconds behind the others, which shows what does not wait for it."""
    store = storage((256, 128), 9, device)
    host = HostBlocks(store, 4)
    want = [t[1:5].clone() for t in store]
    for turn in range(20):
        if late:
            streams = {"compute": torch.cuda.current_stream(), "out": host._out_stream, "back": host._back_stream}
            with torch.cuda.stream(streams[late]):
                torch.cuda._sleep(10_000_000)
        here, there = (1, 5) if turn % 2 == 0 else (5, 1)
        host.copy_out([(here + i, 1 + (i + turn) % 4) for i in range(4)])
        for t in store:
            t[here : here + 4].fill_(turn)
        host.copy_in([(1 + (i + turn) % 4, there + i) for i in range(4)])
    for t, was in zip(store, want, strict=True):
        assert torch.equal(t[1:5], was)


def test_buffers_hold_one_block_at_least() -> None:
    assert stage_rows(1 << 30) == 1 and stage_rows(1 << 20) == 16
    assert stage_bytes(1 << 20) == 4 * (16 << 20)
