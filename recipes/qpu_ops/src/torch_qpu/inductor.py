"""Make torch.compile's default backend, Inductor, raise an explanatory error, because it does not support the device.

When Inductor is first used, it looks up the classes of this module in ``torch.qpu`` (see ``device.__getattr__``).
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch._inductor.codegen.common import get_device_op_overrides, register_device_op_overrides
from torch._inductor.codegen.wrapper import PythonWrapperCodegen as Wrapper


class Refusal(Wrapper):  # type: ignore[misc]
    """Takes the place of each of Inductor's code generators, and raises an error when it is created."""

    def __init__(self, *_: Any, **__: Any) -> None:  # Inductor calls the constructor of some
        self.create()

    @staticmethod
    def create(*_: Any, **__: Any) -> NoReturn:
        """Raise RuntimeError with a message that names the alternatives."""
        raise RuntimeError(
            "torch.compile's backend 'inductor' does not support the device qpu; use "
            "torch.compile(model, backend='qpu'), which fuses elementwise operators, or backend='aot_eager'"
        )


Scheduling = PythonWrapperCodegen = CppWrapperCodegen = WrapperFxCodegen = Refusal

# Without this entry, Inductor raises KeyError before it looks up a code generator. The CPU's entry is requested first,
# because Inductor fills its table only if the table is empty.
register_device_op_overrides("qpu", get_device_op_overrides("cpu"))
