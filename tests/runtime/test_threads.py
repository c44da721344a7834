"""The measured choice of CPU threads, with a scripted clock: no test here depends on how fast this machine is."""

import pytest
import torch

from qengine.runtime import threads
from qengine.runtime.threads import ThreadChoice, choose_threads


class Clock:
    """Time passes only in `run`: a fixed wake-up cost a thread, plus work that threads share."""

    def __init__(self, wake: float, per_item: float) -> None:
        self.now, self.wake, self.per_item = 0.0, wake, per_item
        self.calls = 0

    def perf_counter(self) -> float:
        return self.now

    def run(self, size: int) -> None:
        n = torch.get_num_threads()
        self.calls += 1
        self.now += self.wake * (n - 1) + self.per_item * size / n


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("wake", "limit"), [(0.0, 0), (3.0e-3, 4), (1.0, 64)])
def test_one_thread_up_to_where_waking_pays(
    monkeypatch: pytest.MonkeyPatch, two_threads: None, wake: float, limit: int
) -> None:
    clock = Clock(wake, 1e-3)
    monkeypatch.setattr(threads, "time", clock)
    choice = choose_threads(clock.run, clock.run, 256)
    assert (choice.serial_tokens, choice.serial_rows) == (limit, limit)
    assert torch.get_num_threads() == 2
    assert choice.for_tokens(limit + 1) == 2
    assert limit == 0 or choice.for_tokens(limit) == 1


def test_slow_steps_are_not_measured_twice(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    clock = Clock(10.0, 1.0)
    monkeypatch.setattr(threads, "time", clock)
    assert choose_threads(clock.run, clock.run, 256) == ThreadChoice(2, 0, 0)
    assert clock.calls <= 4


def test_one_thread_has_no_choice() -> None:
    assert torch.get_num_threads() == 1  # tests/conftest.py
    choice = choose_threads(lambda m: pytest.fail("measured"), lambda m: pytest.fail("measured"), 8)
    assert choice.for_tokens(1) == choice.for_rows(100) == 1
