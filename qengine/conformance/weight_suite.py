"""Every check of a weight format, as a list and as a class of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from qengine.conformance.kit import Check
from qengine.conformance.places import places
from qengine.conformance.suite import Suite
from qengine.conformance.weight_checkpoint import CHECKPOINT
from qengine.conformance.weight_compile import COMPILE
from qengine.conformance.weight_format import FORMAT
from qengine.conformance.weight_memory import MEMORY
from qengine.conformance.weight_numbers import NUMBERS
from qengine.conformance.weight_subject import WeightSubject
from qengine.plugin import WeightKernels, WeightQuant, WeightSample

WEIGHT_CHECKS: tuple[Check, ...] = (*FORMAT, *NUMBERS, *MEMORY, *CHECKPOINT, *COMPILE)


class WeightConformance(Suite, checks=WEIGHT_CHECKS):
    """Subclass it in a test file, name the plugin, and pytest runs every check of the kit:

        class TestMyFormat(WeightConformance):
            plugin = MyQuant
    """

    plugin: ClassVar[type[WeightQuant]]
    targets: ClassVar[Sequence[int] | None] = None
    """Compute capabilities to compile for; None: all that the format claims."""

    kernels: ClassVar[type[WeightKernels] | None] = None
    """Other kernels for `plugin`, which are then what is checked."""

    @classmethod
    def samples(cls) -> Sequence[WeightSample]:
        """Stored linears beside those that the plugin makes itself."""
        return ()

    @classmethod
    def make_subject(cls, gpu: bool) -> WeightSubject:
        return WeightSubject(cls.plugin, places(gpu), cls.samples(), cls.targets, cls.kernels)
