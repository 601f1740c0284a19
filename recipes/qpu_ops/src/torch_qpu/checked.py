"""Fused kernels with ``check_finite``, which cannot check the intermediate values of a fused kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from torch_qpu import _C


def unless_checked(graph: GraphModule, fuse: Callable[[GraphModule], GraphModule]) -> Callable[..., Any]:
    """A function that runs the graph fused, or as single operators while operands are checked for Inf and NaN."""
    plain = GraphModule(graph, copy.deepcopy(graph.graph))
    fused = fuse(graph)
    return lambda *arguments: (plain if _C.is_finite_only() else fused).forward(*arguments)
