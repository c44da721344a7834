"""Checks of what a bound linear computes, against `dequantize` in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from qengine.conformance.kit import NotApplicable, Registry, need
from qengine.conformance.places import Place
from qengine.conformance.weight_subject import PLAIN, Stored, WeightSubject, bias_of, bind, inputs
from qengine.plugin import LinearOp
from qengine_kernels.testing import poisoned_empty, relative_error

NUMBERS = Registry()
ROWS = (1, 3, 20, 300)
"""Rows of x: one, few, some, many; kernels differ in where they change their way."""
ROUNDED = 0.04
"""Error that 8-bit activations may add."""
ROUNDED_EXTREMES = 2.0**-4
"""The same beside weights of random bits, a few of which outweigh all others, so that nothing averages out: e4m3 is off
by so much of a value at most."""
FLOATING_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)


def product(own: Stored, x: torch.Tensor) -> torch.Tensor:
    """x @ W.T + bias in float32 on the CPU."""
    y = x.float().cpu() @ own.weight.T
    return y + own.tensors["bias"].float() if own.spec.bias else y


def compare(
    own: Stored, op: LinearOp, place: Place, dtype: torch.dtype, limit: float, rows: Sequence[int],
    rounded: float = ROUNDED,
) -> None:  # fmt: skip
    """Random rows by the norm of the error; unit vectors, which show each weight by itself, by the largest error."""
    limit = limit + rounded if op.rounds_activations else limit
    where = f"{own} on {place} in {str(dtype).removeprefix('torch.')}"
    for m in rows:
        x = inputs(m, own.spec, dtype, place)
        before = x.clone()
        with poisoned_empty():
            y = op(x)
        need(tuple(y.shape) == (m, own.spec.out_features) and y.dtype is dtype,
             f"{where}: {m} rows give {y.dtype} {tuple(y.shape)}")  # fmt: skip
        need(torch.equal(x, before), f"{where}: the op changes its input")
        error = relative_error(y, product(own, x))
        need(error <= limit, f"{where}: {m} rows differ from x @ dequantize.T by {error:.2g}, need <= {limit:.2g}")
    _compare_elements(own, op, place, dtype, limit, where)


def _compare_elements(
    own: Stored, op: LinearOp, place: Place, dtype: torch.dtype, limit: float, where: str
) -> None:
    k = own.spec.in_features
    eye = torch.eye(k, dtype=dtype, device=place.device)
    got = torch.cat([op(rows).float().cpu() for rows in (eye[:2], eye[2:])])
    want = product(own, eye)
    finest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    excess = (got - want).abs() - (2 * limit * want.abs().amax(0) + finest)
    i, n = divmod(int(excess.argmax()), own.spec.out_features)
    scale = float(want[:, n].abs().max())
    need(
        bool((excess <= 0).all()),
        f"{where}: weight [{n}, {i}] acts as {got[i, n]:.4g}, dequantize says {want[i, n]:.4g} (largest of its "
        f"output: {scale:.4g})",
    )


@NUMBERS.add("products")
def products(subject: WeightSubject) -> None:
    """The bound op multiplies as `dequantize` says: random rows and each single weight, odd and ragged shapes."""
    count = 0
    for own, place, dtype, limit in subject.runs():
        rows = ROWS if own.spec == PLAIN else ROWS[1:2]
        compare(own, own.bind(place, dtype), place, dtype, limit, rows)
        count += 1
    if not count:
        raise NotApplicable("the format refuses every place of this run")


@NUMBERS.add("all codes")
def all_codes(subject: WeightSubject) -> None:
    """The same for stored bits that no quantizer would write: every code, every zero point."""
    changed = [other for own in subject.stored if (other := with_random_bits(own)) is not None]
    if not changed:
        raise NotApplicable("no integer tensor runs along inputs and outputs")
    for own, place, dtype, limit in subject.runs(changed[:4]):
        compare(own, own.bind(place, dtype), place, dtype, limit, ROWS[1:2], ROUNDED_EXTREMES)


def with_random_bits(own: Stored, *, codes_only: bool = False) -> Stored | None:
    """Random bits in every tensor of integers (or one-byte floats) that runs along inputs and outputs; `codes_only`: in
    the largest of them."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for need_ in own.scheme.tensors(own.spec):
        t = own.tensors.get(need_.leaf)
        if t is None or need_.output_dim is None or need_.input_dim is None:
            continue
        if not t.is_floating_point():
            low, high = torch.iinfo(t.dtype).min, torch.iinfo(t.dtype).max
            tensors[need_.leaf] = torch.randint(low, high, t.shape, generator=generator, dtype=t.dtype)
        elif t.dtype in FLOATING_BYTES:
            bits = torch.randint(0, 256, t.shape, generator=generator, dtype=torch.uint8).view(t.dtype)
            tensors[need_.leaf] = torch.where(torch.isfinite(bits.float()), bits.float(), 0.0).to(t.dtype)
    if codes_only and tensors:
        largest = max(tensors, key=lambda leaf: tensors[leaf].nbytes)
        tensors = {largest: tensors[largest]}
    return own.changed(**tensors) if tensors else None


@NUMBERS.add("fused")
def fused(subject: WeightSubject) -> None:
    """Shards of equal key, bound as one op, give what each gives alone, one after the other."""
    pairs = [pair for own in subject.stored if (pair := beside(own)) is not None]
    if not pairs:
        raise NotApplicable("no two stored linears of equal key and inputs")
    for own, other in pairs[:2]:
        for _, place, dtype, limit in subject.runs([own]):
            op = bind([own, other], place, dtype)
            x = inputs(3, own.spec, dtype, place)
            want = torch.cat([product(own, x), product(other, x)], dim=1)
            limit = limit + ROUNDED if op.rounds_activations else limit
            need(op.out_features == want.shape[1], f"two shards of {own}: out_features is {op.out_features}")
            error = relative_error(op(x), want)
            need(error <= limit, f"two shards of {own} on {place}, fused: error {error:.2g}, need <= {limit:.2g}")


def beside(own: Stored) -> tuple[Stored, Stored] | None:
    """`own` and another linear of the same scheme: itself with other codes."""
    other = with_random_bits(own, codes_only=True)
    if other is None:
        return None
    spec = replace(own.spec, name=own.spec.name.replace("_proj", "_other"))
    tensors = dict(other.tensors) | ({"bias": bias_of(spec) * 2} if spec.bias else {})
    other = replace(other, spec=spec, tensors=tensors)
    return (own, other) if other.scheme.key == own.scheme.key else None


@NUMBERS.add("determinism")
def determinism(subject: WeightSubject) -> None:
    """The same input gives the same bits, twice from one op and from another op over the same tensors."""
    for own, place, dtype, _ in subject.runs(subject.stored[:2]):
        op, twin = own.bind(place, dtype), own.bind(place, dtype)
        for m in (1, 20):
            x = inputs(m, own.spec, dtype, place)
            y = op(x)
            need(same_bits(op(x), y), f"{own} on {place}: a second call with the same {m} rows gives other bits")
            need(same_bits(twin(x), y), f"{own} on {place}: the same tensors, bound again, give other bits")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
