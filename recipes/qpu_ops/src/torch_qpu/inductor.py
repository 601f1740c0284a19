"""What torch.compile's default backend, Inductor, finds of the device: that it has no code generator for it.

Inductor asks ``torch.qpu`` for these classes by name, when it is first used; see ``device.__getattr__``.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch._inductor.codegen.common import get_device_op_overrides, register_device_op_overrides
from torch._inductor.codegen.wrapper import PythonWrapperCodegen as Wrapper


class Refusal(Wrapper):  # type: ignore[misc]
    """In the place of each of Inductor's generators of code."""

    def __init__(self, *_: Any, **__: Any) -> None:  # Inductor makes some by their constructor
        self.create()

    @staticmethod
    def create(*_: Any, **__: Any) -> NoReturn:
        """Raise RuntimeError with what to use instead."""
        raise RuntimeError(
            "torch.compile's backend 'inductor' generates no code for the device qpu; use "
            "torch.compile(model, backend='qpu'), which fuses elementwise operators, or backend='aot_eager'"
        )


Scheduling = PythonWrapperCodegen = CppWrapperCodegen = WrapperFxCodegen = Refusal

# Without an entry of its own Inductor raises KeyError before it asks for a generator. The CPU's is asked for first:
# an Inductor whose table is not empty does not fill it.
register_device_op_overrides("qpu", get_device_op_overrides("cpu"))
