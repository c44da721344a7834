"""The order in which requests run, wait and give way."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Literal

from qengine.core.request import Request, Status

Policy = Literal["fcfs", "priority"]
OrderKey = tuple[int, int, float, int]


class Order:
    """Sort keys of one policy. fcfs: by arrival. priority: lower number first, then arrival."""

    def __init__(self, policy: Policy) -> None:
        self._by_priority = policy == "priority"

    def running(self, request: Request) -> OrderKey:
        """The last running request in this order is the first to be preempted."""
        priority = request.priority if self._by_priority else 0
        return (priority, 0, request.arrival, request.sequence_number)

    def waiting(self, request: Request) -> OrderKey:
        """Preempted requests go before those that never ran (of the same priority)."""
        priority = request.priority if self._by_priority else 0
        never_ran = int(request.status is not Status.PREEMPTED)
        return (priority, never_ran, request.arrival, request.sequence_number)


class WaitingQueue:
    """Waiting and preempted requests, sorted. A request's status must not change while it is in here."""

    def __init__(self, order: Order) -> None:
        self._key = order.waiting
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=self._key)

    def pop(self, index: int) -> Request:
        return self._requests.pop(index)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, self._key(request), key=self._key)
        assert self._requests[index] is request
        del self._requests[index]
