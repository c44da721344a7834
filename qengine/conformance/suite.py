"""Checks as a class of tests that pytest collects, without importing pytest: authors have it, users need not."""

from __future__ import annotations

import os
import unittest
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from qengine.conformance.kit import Check, NotApplicable
from qengine.conformance.places import INTERPRET_ENV


class Suite:
    """Base of the classes that authors subclass: one test method for each check, one subject for all of them."""

    __test__: ClassVar[bool] = False
    gpu: ClassVar[bool | None] = None
    """Whether to run on a real GPU; None: where there is one and Triton is not told to interpret. `pytest --gpu` of the
    pytest plugin sets it for all classes."""
    _subject: ClassVar[Any] = None

    def __init_subclass__(cls, checks: Sequence[Check] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__test__ = hasattr(cls, "plugin")
        cls._subject = None
        for check in checks:
            setattr(cls, method_name(check), _method(check))

    @classmethod
    @abstractmethod
    def make_subject(cls, gpu: bool) -> Any:
        """What the checks of this kind ask about."""

    @classmethod
    def on_gpu(cls) -> bool:
        if Suite.gpu is not None:
            return Suite.gpu
        return torch.cuda.is_available() and os.environ.get(INTERPRET_ENV, "0") != "1"

    @classmethod
    def subject(cls) -> Any:
        if cls._subject is None:
            cls._subject = cls.make_subject(cls.on_gpu())
        return cls._subject


def method_name(check: Check) -> str:
    return "test_" + check.name.replace(" ", "_")


def _method(check: Check) -> Callable[[Suite], None]:
    def test(self: Suite) -> None:
        if check.gpu and not self.on_gpu():
            raise unittest.SkipTest("needs a GPU")
        try:
            left_out = check.run(self.subject())
        except NotApplicable as e:
            raise unittest.SkipTest(str(e)) from e
        if left_out:
            warnings.warn(left_out, stacklevel=1)

    test.__doc__ = check.what
    return test
