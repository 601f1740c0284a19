"""Run graphs unfused while ``check_finite`` is on, because it cannot check a fused kernel's intermediate values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from torch_qpu import _C


def unless_checked(graph: GraphModule, fuse: Callable[[GraphModule], GraphModule]) -> Callable[..., Any]:
    """Return a function that runs the graph fused, or unfused while operands are checked for Inf and NaN."""
    plain = GraphModule(graph, copy.deepcopy(graph.graph))
    fused = fuse(graph)
    return lambda *arguments: (plain if _C.is_finite_only() else fused).forward(*arguments)
