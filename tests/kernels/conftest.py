"""Kernel tests run twice: in Triton's interpreter without a GPU, and marked `gpu` on the real thing."""

import pytest
import torch


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda":
        return torch.device("cuda")
    if torch.cuda.is_available():
        pytest.skip("with a GPU the same cases run as cuda; the interpreter is for machines without one")
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
