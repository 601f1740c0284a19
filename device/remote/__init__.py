"""Kernels on boards: compiled here for the board, run and timed there, compared with a reference.

Two roads lead to a board, and one command takes both (``profiling``):

- **RPC**: TVM's own server runs on the board (``board_server``), and ``rpc_worker`` talks to it.
- **loader**: a small program of ours (``loader/``) is sent to the board; it loads a kernel's plain C entry. For boards
  that no TVM runtime exists for (armv7), and for kernels of the QPUs.

``rpc_worker`` runs in a process of its own, beside TVM: a TVM that crashes or hangs takes no task with it. What it
imports of ours (``compiling``, ``comparing``, ``reporting``) imports nothing else of ours.
"""
