"""The KV-cache dtype contract.

An instance of a KV dtype stores K, or V, of one attention layer: it says where each vector lies in a block (`layout`),
how vectors become stored rows and back (`encode` / `decode` in torch, `functions` as Triton device functions), which
scales it takes and where it runs. K and V of a layer may be of different dtypes, so each describes itself alone and the
engine puts the two side by side in a block (`KVLayout.of`).

The paged-attention and cache-write kernels are templates that take the device functions; a plugin that needs more may
bring its own kernels with `bind`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from qengine.plugin.device import Capability, DeviceInfo

ScaleGranularity = Literal["none", "tensor", "head"]
Side = Literal["k", "v"]
ALIGNMENT = 16
"""Bytes: each side of a block, and each block, starts at a multiple of it."""


@dataclass(frozen=True)
class AttentionSpec:
    """Shape and rules of one attention layer.

    `scale` multiplies q.k; `sliding_window` W lets a query at position p see positions p-W+1..p; `soft_cap` c maps
    logits to c * tanh(logits / c).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class SideLayout:
    """Where the rows of K, or of V, lie in their part of a block: `nbytes` bytes for each block, counted from the
    part's first byte.

    Viewed as `dtype`, the row of token t (0 <= t < block size) and KV head h starts at element `t * token_stride + h *
    head_stride` and is `row` elements long. A row is what `KVDtype.encode` makes of one vector: its values, one element
    each or packed, and whatever lies beside them (inline scales, zero points).
    """

    dtype: torch.dtype
    nbytes: int
    token_stride: int
    head_stride: int
    row: int

    @classmethod
    def dense(cls, spec: AttentionSpec, block_size: int, dtype: torch.dtype, row: int | None = None) -> SideLayout:
        """[block_size, num_kv_heads, row] of `dtype`, no padding. `row` is head_dim when left out."""
        row = spec.head_dim if row is None else row
        token = spec.num_kv_heads * row
        return cls(dtype, block_size * token * dtype.itemsize, token, row, row)

    def last_byte(self, spec: AttentionSpec, block_size: int) -> int:
        """One past the last byte that a row of one block touches; above `nbytes` in a layout that is wrong."""
        last = (block_size - 1) * self.token_stride + (spec.num_kv_heads - 1) * self.head_stride + self.row
        return last * self.dtype.itemsize


@dataclass(frozen=True)
class KVLayout:
    """One block of one layer, K and V side by side; the only source of block bytes in qengine.

    The storage of one layer is uint8 [num_blocks, at least block_bytes]; `k` describes the bytes from `k_offset` on
    within each block, `v` those from `v_offset` on. Offsets are bytes and multiples of ALIGNMENT, as is block_bytes.
    """

    block_size: int
    block_bytes: int
    k: SideLayout
    v: SideLayout
    k_offset: int
    v_offset: int

    @classmethod
    def of(cls, block_size: int, k: SideLayout, v: SideLayout) -> KVLayout:
        """K first, then V, each aligned."""
        v_offset = _aligned(k.nbytes)
        return cls(block_size, v_offset + _aligned(v.nbytes), k, v, 0, v_offset)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass
class KVScales:
    """Scales of one layer: float32 [num_kv_heads] each, multiply-to-dequantise, finite and > 0. `source` says where
    they come from ("checkpoint", "calibration file", "default 1.0"). Ones for a side whose dtype takes none."""

    k: torch.Tensor
    v: torch.Tensor
    source: str = "default 1.0"


@dataclass(frozen=True)
class KVFunctions:
    """Triton device functions of a format that stores one element a value and nothing beside; the fast path.

    encode(x, NATIVE) : float32 block (already divided by the scale) -> block of `layout.dtype` to store
    decode(b, NATIVE) : loaded block of `layout.dtype` -> float block (float16 or float32), not yet scaled
    NATIVE is a constexpr bool: hardware conversions may be used. Both must work in Triton's interpreter with
    NATIVE=False. Elements of any shape, each on its own.

    pairs(w, MODE)    : optional, for 8-bit elements; what makes attention fast. Block of 16-bit elements of two
                        neighbouring stored values each -> the values of the low bytes and those of the high ones,
                        float16 blocks.
    MODE is a constexpr int: 0 plain operations, as the interpreter needs them; 1 and 2 may use inline assembly, 2
    also hardware conversions. A function may treat all alike.
    """

    encode: Any
    decode: Any
    pairs: Any = None


@dataclass(frozen=True)
class KVRowFunctions:
    """Triton device functions of a format whose rows are more than one element a value: packed values, inline scales.

    store(x, p_rows, row_mask, HEAD_DIM, NATIVE) : stores the rows of a tile of vectors.
        x         float32 [R, D] (already divided by the scale); D is a power of two >= HEAD_DIM, zeros from HEAD_DIM on
        p_rows    [R, 1] pointers to `layout.dtype`: the first element of each row
        row_mask  bool [R, 1]: rows that are to be stored; nothing may be stored for others
    load(p_rows, o_dim, row_mask, HEAD_DIM, NATIVE) -> float16 or float32 tile, not yet scaled.
        p_rows, row_mask, o_dim are [N, 1], [N, 1] and [1, D], or [1, N], [1, N] and [D, 1]: written with
        broadcasting alone, one function serves both. Element (n, d) is value o_dim[d] of row n; 0 where row_mask is
        false or o_dim >= HEAD_DIM, and nothing may be read there.
    HEAD_DIM (int) and NATIVE (bool, hardware conversions may be used) are constexpr. Both functions must work in
    Triton's interpreter with NATIVE=False.
    """

    store: Any
    load: Any


class KVDtype(ABC):
    """A KV-cache format: entry point of group `qengine.kv_dtype`. An instance stores one `side` of one layer.

    Construction is cheap and refuses nothing: whether the format can serve that layer is `capability`'s answer.
    """

    name: ClassVar[str]
    contract: ClassVar[int | str]
    """The contract version that the plugin was written for: a literal, so that it stays when qengine's moves on."""
    scale_granularity: ClassVar[tuple[ScaleGranularity, ...]] = ("none",)
    max_value: ClassVar[float | None] = None
    """Largest finite stored value; scale = amax / max_value. None when the format takes no scales from outside (it has
    none, or makes its own and stores them inline)."""
    sides_alike: ClassVar[bool] = False
    """Whether K and V of one layer are stored in exactly the same way, so that both may be coded in one call of either
    side's `encode` and `decode`. Only for speed."""

    elementwise: ClassVar[bool] = False
    """Whether each value is stored as one element that depends on the value alone: wherever it lies in a vector, in
    whichever layer and side. An element of a float dtype is then the value cast to it. CPU kernels may code 8-bit
    elements by tables that they make with `encode` and `decode`. Only for speed."""

    def __init__(self, spec: AttentionSpec, side: Side, compute_dtype: torch.dtype) -> None:
        self.spec, self.side, self.compute_dtype = spec, side, compute_dtype

    @abstractmethod
    def capability(self, device: DeviceInfo) -> Capability:
        """Whether this side of this layer can be stored and read there; pure, needs no GPU."""

    @abstractmethod
    def layout(self, block_size: int) -> SideLayout:
        """This side's part of one block."""

    @abstractmethod
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., head_dim] float, already divided by its scale -> rows [..., row] of the layout's dtype. Saturating;
        a value that is not finite stays so, or makes its whole vector so, and never reaches another vector."""

    @abstractmethod
    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What stored rows mean: [..., row] -> [..., head_dim] of the float `dtype`, not yet scaled. `functions` must
        mean the same."""

    @abstractmethod
    def functions(self) -> KVFunctions | KVRowFunctions:
        """Triton device functions; imports Triton only when called."""

    def bind(
        self, v: KVDtype, layout: KVLayout, storage: torch.Tensor, scales: KVScales, info: DeviceInfo
    ) -> Any | None:
        """Kernels of the format's own for a layer whose K (`self`) and V (`v`) both are of it: an object with `kernel`,
        `write` and `attend` (see `qengine.layers.attention.KVLayer`), and with `rotate_and_write` too where it rotates
        keys as it stores them (`RotatingKVLayer` there). None, the default: the shared templates."""
        return None

    @classmethod
    def uncalibrated_note(cls) -> str | None:
        """A line for the start-up report when scales default to 1.0; None when that is harmless."""
        return None
