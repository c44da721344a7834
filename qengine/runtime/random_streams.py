"""Where the sampler's random numbers come from: a request's stream and the token's place in it, nothing else."""

from __future__ import annotations

import hashlib

import numpy as np

from qengine.core.request import Request

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def stream_of(request: Request, engine_seed: int) -> int:
    """The key of a request's randomness, 64 bits: of its seed, or else of the engine's seed and the request's id."""
    seed = request.sampling.seed
    return stream(f"seed {seed}" if seed is not None else f"engine {engine_seed} {request.request_id}")


def stream(text: str) -> int:
    """The key that a text stands for."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) with 53 random bits, functions of their arguments only. Both uint64, of equal shape.

    Stafford's 13th mixer of stream + position * golden ratio: SplitMix64 (Steele et al. 2014) begun at a random place.
    """
    z = streams + (positions + np.uint64(1)) * GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
