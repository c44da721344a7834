"""AWQ's tensor layouts: gemm, gemv, gemv_fast, llm-awq, marlin. A module's shapes and dtypes tell which one it has."""

from __future__ import annotations

from qengine_awq.layouts.base import Layout
from qengine_awq.layouts.gemm import Gemm
from qengine_awq.layouts.gemv import Gemv
from qengine_awq.layouts.gemv_fast import GemvFast, LlmAwq
from qengine_awq.layouts.marlin import Marlin

__all__ = ["GEMM", "LAYOUTS", "Layout"]

GEMM = Gemm()
LAYOUTS: tuple[Layout, ...] = (GEMM, Gemv(), GemvFast(), LlmAwq(), Marlin())
