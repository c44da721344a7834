"""Checks of a bound cache: what writes and attends, on every place, step after step."""

from __future__ import annotations

import torch

from qengine.conformance.kit import NotApplicable, Registry, need
from qengine.conformance.kv_format import bits, stored
from qengine.conformance.kv_subject import (
    BLOCK_SIZES,
    SMALL,
    SPECS,
    Cache,
    KVSubject,
    attention,
    make_cache,
    near,
    step,
    vectors,
    where,
)
from qengine.conformance.places import Place
from qengine.plugin import AttentionSpec, DeviceInfo, KVDtype
from qengine.plugin.discovery import load_plugin
from qengine.runtime.capture import captured

KV_STEPS = Registry()
STORE_LIMIT = 5e-3
"""By how much a kernel's stored values may lie farther from what was to be stored than those that `encode` makes."""
MOVED = 0.01
"""Share of values that a kernel may round to the other side: ties, of which 16-bit values in 4 bits have some."""


def prefilled(cache: Cache, tokens: int, seed: int = 4) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """One sequence, written in a step: its blocks, q [tokens, num_heads, D] and what attend gave."""
    q, k, v = vectors(cache.spec, tokens, seed)
    blocks = cache.take(tokens)
    batch = step(cache, [(blocks, 0, tokens)])
    cache.write(batch, k, v)
    return blocks, q, cache.attend(batch, q)


@KV_STEPS.add("store")
def store(subject: KVSubject) -> None:
    """What is written means what `encode` makes, whatever lay there before, and no other byte changes."""
    for spec, place, dtype, _ in [*subject.runs(SMALL), *subject.runs(*SPECS[1:3], one_dtype=True)]:
        name = where(spec, 16, place, dtype)
        caches = [make_cache(subject.plugin, spec, 16, place, dtype, background=b) for b in (0, 255)]
        tokens = 21
        _, k, v = vectors(spec, tokens, 6)
        for cache in caches:
            blocks = cache.take(tokens)
            batch = step(cache, [(blocks, 0, tokens)])
            slots = batch.groups[0].slot_mapping
            slots[7] = -1 if place.info.type == "cuda" else slots[7]  # rows that only pad a captured graph
            before = cache.storage.clone()
            cache.write(batch, k, v)
            _no_other_byte(cache, before, slots.cpu(), name)
        kept = slots.cpu() >= 0
        for side, x in (("k", k), ("v", v)):
            plugin = caches[0].k if side == "k" else caches[0].v
            x = x.to(dtype).float()
            want = plugin.decode(stored(plugin, x), torch.float32)[kept]
            got = [cache.meaning(side).flatten(0, 1)[slots.cpu()[kept]] for cache in caches]
            need(torch.equal(got[0], got[1]), f"{name}: stored {side} depends on what lay there before: bytes of a row "
                 "stay unwritten")  # fmt: skip
            as_good(f"{name}: stored {side}", got[0], want, x[kept])


def as_good(name: str, got: torch.Tensor, want: torch.Tensor, x: torch.Tensor) -> None:
    """`got` rounds x as `want` does. Where the two differ, x lay between two codes and both are as near to it; a kernel
    that divides a last bit apart takes the other one."""
    farther = ((got - x).abs() - (want - x).abs()).clamp_min(0)
    error = float(farther.norm() / want.norm())
    need(error <= STORE_LIMIT, f"{name}: off by {error:.2g} more than what encode makes, need <= {STORE_LIMIT:.2g}")
    moved = float((got - want).abs().gt(STORE_LIMIT * x.abs().amax()).float().mean())
    need(moved <= MOVED, f"{name}: {moved:.2%} of the values are not what encode makes, need <= {MOVED:.0%}")


def _no_other_byte(cache: Cache, before: torch.Tensor, slots: torch.Tensor, name: str) -> None:
    """Every byte outside the rows of the written slots is as before."""
    allowed = torch.zeros(cache.storage.shape, dtype=torch.bool)
    size = cache.block_size
    for side, offset in ((cache.layout.k, cache.layout.k_offset), (cache.layout.v, cache.layout.v_offset)):
        item = side.dtype.itemsize
        for slot in slots[slots >= 0].tolist():
            for head in range(cache.spec.num_kv_heads):
                first = offset + ((slot % size) * side.token_stride + head * side.head_stride) * item
                allowed[slot // size, first : first + side.row * item] = True
    changed = (cache.storage != before).cpu() & ~allowed
    need(not changed.any(), f"{name}: {int(changed.sum())} bytes change outside the rows of the written slots")


@KV_STEPS.add("attention")
def shapes(subject: KVSubject) -> None:
    """Prefill and decode are attention over what `decode` says: head dims, GQA ratios, block sizes, windows, caps."""
    runs = [(16, *run) for run in subject.runs(SMALL)]
    runs += [(32, *run) for run in subject.runs(SMALL, one_dtype=True)]
    runs += [(16, *run) for run in subject.runs(*SPECS[1:], one_dtype=True)]
    for block_size, spec, place, dtype, limit in runs:
        cache = make_cache(subject.plugin, spec, block_size, place, dtype)
        name = where(spec, block_size, place, dtype)
        blocks, q, got = prefilled(cache, 37)
        near(f"{name}: prefill", got, attention(cache, q, blocks, 0), 2 * limit)
        one = step(cache, [(blocks, 36, 1)])
        near(f"{name}: decode", cache.attend(one, q[36:]), attention(cache, q[36:], blocks, 36), 2 * limit)


@KV_STEPS.add("block edges")
def block_edges(subject: KVSubject) -> None:
    """Every token count around the edges of blocks, prefilled in one step and decoded in one step."""
    for spec, place, dtype, limit in subject.runs(SMALL, one_dtype=True):
        size = BLOCK_SIZES[0]
        counts = [1, 2, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1]
        cache = make_cache(subject.plugin, spec, size, place, dtype)
        name = where(spec, size, place, dtype)
        held = [cache.take(count) for count in counts]
        q, k, v = vectors(spec, sum(counts), 13)
        batch = step(cache, [(blocks, 0, count) for blocks, count in zip(held, counts, strict=True)])
        cache.write(batch, k, v)
        parts, queries = cache.attend(batch, q).split(counts), q.split(counts)
        for part, own, blocks, count in zip(parts, queries, held, counts, strict=True):
            near(f"{name}: prefill of {count} tokens", part, attention(cache, own, blocks, 0), 2 * limit)
        batch = step(cache, [(blocks, count - 1, 1) for blocks, count in zip(held, counts, strict=True)])
        rows = cache.attend(batch, torch.cat([own[-1:] for own in queries]))
        for row, part, count in zip(rows, parts, counts, strict=True):
            near(f"{name}: decode at {count} tokens", row[None], part[-1:], 2 * limit)


@KV_STEPS.add("all codes")
def all_codes(subject: KVSubject) -> None:
    """Attention over stored bits that `encode` would not make: every code of every element."""
    for spec, place, dtype, limit in subject.runs(SMALL, one_dtype=True):
        cache = make_cache(subject.plugin, spec, 16, place, dtype)
        blocks, q, _ = prefilled(cache, 32)
        generator = torch.Generator().manual_seed(8)
        for side in ("k", "v"):
            rows = cache.rows(side)[torch.tensor(blocks)]
            noise = torch.randint(0, 256, bits(rows).shape, dtype=torch.uint8, generator=generator)
            random = noise.view(rows.dtype)
            plugin = cache.k if side == "k" else cache.v
            sizes = plugin.decode(random, torch.float32).abs().amax(-1, keepdim=True)
            _put(cache, side, blocks, torch.where((sizes < 100) & (sizes > 0.01), random, rows))
        got = cache.attend(step(cache, [(blocks, 31, 1)]), q[31:])
        near(f"{where(spec, 16, place, dtype)}: random bits", got, attention(cache, q[31:], blocks, 31), 4 * limit)


def _put(cache: Cache, side: str, blocks: list[int], rows: torch.Tensor) -> None:
    """Store rows [blocks, block_size, num_kv_heads, row] as they are."""
    own = cache.layout.k if side == "k" else cache.layout.v
    offset = cache.layout.k_offset if side == "k" else cache.layout.v_offset
    host = cache.storage.cpu()
    flat = host.view(own.dtype)[:, offset // own.dtype.itemsize :]
    shape = (len(host), cache.block_size, cache.spec.num_kv_heads, own.row)
    strides = (flat.stride(0), own.token_stride, own.head_stride, 1)
    flat.as_strided(shape, strides, flat.storage_offset())[torch.tensor(blocks)] = rows
    cache.storage.copy_(host)


@KV_STEPS.add("steps")
def steps(subject: KVSubject) -> None:
    """Prefill = chunked prefill = token by token = prefix hit: the same stored bits, the same results."""
    for spec, place, dtype, limit in subject.runs(SMALL, one_dtype=True):
        tokens, name = 19, where(SMALL, 16, place, dtype)
        q, k, v = vectors(spec, tokens, 9)
        outs, means = [], []
        for chunks in ([tokens], [10, 6, 1, 2], [1] * tokens):
            cache = make_cache(subject.plugin, spec, 16, place, dtype)
            blocks, done, parts = cache.take(tokens), 0, []
            for n in chunks:
                batch, part = step(cache, [(blocks, done, n)]), slice(done, done + n)
                cache.write(batch, k[part], v[part])
                parts.append(cache.attend(batch, q[part]))
                done += n
            outs.append(torch.cat(parts))
            means.append(torch.cat([bits(cache.rows(s)[torch.tensor(blocks)]).flatten() for s in ("k", "v")]))
        for how, out, mean in zip(("in chunks", "token by token"), outs[1:], means[1:], strict=True):
            need(torch.equal(mean, means[0]), f"{name}: written {how}, other bits are stored than in one step")
            near(f"{name}: results {how}", out, outs[0], 2 * limit)
        shared = [*blocks[:1], *cache.take(3)]
        hit = step(cache, [(shared, 16, 3)])
        cache.write(hit, k[16:], v[16:])
        near(f"{name}: a prefix hit", cache.attend(hit, q[16:]), outs[0][16:], 2 * limit)


@KV_STEPS.add("scales")
def scales(subject: KVSubject) -> None:
    """Scales of K and V, different for each head, multiply what is stored: on write and on read."""
    if subject.plugin.max_value is None:
        raise NotApplicable("the format takes no scales from outside")
    for spec, place, dtype, limit in subject.runs(SMALL):
        pair = torch.tensor([0.5, 0.02]), torch.tensor([0.03, 0.25])
        cache = make_cache(subject.plugin, spec, 16, place, dtype, scales=pair)
        name = where(spec, 16, place, dtype)
        blocks, q, got = prefilled(cache, 20)
        _, k, v = vectors(spec, 20, 4)
        for side, x in (("k", k), ("v", v)):
            kept = cache.meaning(side)[torch.tensor(blocks)].flatten(0, 1)[:20]
            near(f"{name}: {side} stored with scales", kept, x.to(dtype).float(), 0.3)
        near(f"{name}: attention with scales", got, attention(cache, q, blocks, 0), 2 * limit)


@KV_STEPS.add("mixed sides")
def mixed_sides(subject: KVSubject) -> None:
    """K of this format beside V of another, and the other way round (--kv-dtype k=...,v=...)."""
    auto = load_plugin("kv", "auto")
    for spec, place, dtype, limit in subject.runs(SMALL, one_dtype=True):
        for k, v in ((subject.plugin, auto), (auto, subject.plugin)):
            cache = make_cache(k, spec, 16, place, dtype, v_plugin=v)
            blocks, q, got = prefilled(cache, 19)
            name = f"{where(spec, 16, place, dtype)}, k={k.name}, v={v.name}"
            near(name, got, attention(cache, q, blocks, 0), 2 * limit)


@KV_STEPS.add("sharding")
def sharding(subject: KVSubject) -> None:
    """A layer with half of the heads gives those heads' results of the whole."""
    for spec, place, dtype, limit in subject.runs(SMALL, one_dtype=True):
        q, k, v = vectors(spec, 20, 10)
        half = AttentionSpec(2, 1, spec.head_dim, spec.scale)
        results = []
        for own, heads, kv in ((spec, slice(0, 4), slice(0, 2)), (half, slice(0, 2), slice(0, 1)),
                               (half, slice(2, 4), slice(1, 2))):  # fmt: skip
            cache = make_cache(subject.plugin, own, 16, place, dtype)
            batch = step(cache, [(cache.take(20), 0, 20)])
            cache.write(batch, k[:, kv].contiguous(), v[:, kv].contiguous())
            results.append(cache.attend(batch, q[:, heads].contiguous()))
        near(where(spec, 16, place, dtype), torch.cat(results[1:], dim=1), results[0], 2 * limit)


@KV_STEPS.add("offload")
def offload(subject: KVSubject) -> None:
    """Blocks copied to the host and back into other blocks give the same bits: a block is all there is."""
    for spec, place, dtype, _ in subject.runs(SMALL, one_dtype=True):
        cache = make_cache(subject.plugin, spec, 16, place, dtype)
        blocks, q, _ = prefilled(cache, 40)
        want = cache.attend(step(cache, [(blocks, 39, 1)]), q[39:])
        saved = cache.storage[torch.tensor(blocks)].cpu()
        cache.storage[1:] = 170
        others = cache.take(40)
        cache.storage[torch.tensor(others)] = saved.to(place.device)
        got = cache.attend(step(cache, [(others, 39, 1)]), q[39:])
        need(torch.equal(got, want), f"{where(spec, 16, place, dtype)}: moved blocks give other bits")


@KV_STEPS.add("determinism")
def determinism(subject: KVSubject) -> None:
    """The same steps give the same bits, and what other sequences hold does not matter."""
    for spec, place, dtype, _ in subject.runs(SMALL, one_dtype=True):
        alone, name = make_cache(subject.plugin, spec, 16, place, dtype), where(spec, 16, place, dtype)
        blocks, _, first = prefilled(alone, 20)
        crowded = make_cache(subject.plugin, spec, 16, place, dtype)
        prefilled(crowded, 30, seed=12)
        others, _, second = prefilled(crowded, 20)
        need(torch.equal(first, second), f"{name}: beside another sequence the result has other bits")
        for side in ("k", "v"):
            a, b = (bits(c.rows(side)[torch.tensor(own)])[:1] for c, own in ((alone, blocks), (crowded, others)))
            need(torch.equal(a, b), f"{name}: beside another sequence other bits of {side} are stored")


@KV_STEPS.add("graphs", gpu=True)
def graphs(subject: KVSubject) -> None:
    """A captured write and attend, replayed with other inputs, give the bits of plain calls."""
    for spec, place, dtype, _ in subject.runs(SMALL):
        if place.device.type == "cuda":
            _replay(make_cache(subject.plugin, spec, 16, place, dtype), where(spec, 16, place, dtype))


def _replay(cache: Cache, name: str) -> None:
    blocks, _, _ = prefilled(cache, 40)
    batch = step(cache, [(blocks, 39, 1)])
    held = [t.to(cache.dtype).to(cache.place.device) for t in vectors(cache.spec, 1, 20)]

    def run() -> torch.Tensor:
        cache.layer.write(held[1], held[2], batch, 0)
        return cache.layer.attend(held[0], batch, 0)

    out = [run()]
    graph = captured(lambda: out.append(run()), torch.cuda.graph_pool_handle())
    for seed in (21, 22):
        for old, new in zip(held, vectors(cache.spec, 1, seed), strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        got = out[-1].clone()
        need(torch.equal(got, run()), f"{name}: a replay gives other bits than plain calls")


def launch_all(
    plugin: type[KVDtype], spec: AttentionSpec, block_size: int, info: DeviceInfo, dtype: torch.dtype
) -> None:
    """Everything that a layer launches on a chip: a write, decodes and a prefill. For `launches.recorded`."""
    place = Place(info.name, torch.device("cpu"), info, ((dtype, 1.0),))
    cache = make_cache(plugin, spec, block_size, place, dtype, num_blocks=64)
    q, k, v = vectors(spec, 22, 0)
    batch = step(cache, [(cache.take(600), 599, 1), (cache.take(17), 16, 1), (cache.take(20), 0, 20)])
    cache.write(batch, k, v)
    cache.attend(batch, q)
