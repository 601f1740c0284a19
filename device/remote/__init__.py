"""Kernels on boards: compile them on the host, run and time them on the board, and check their results.

``profiling`` supports two transports to a board:

- **RPC**: TVM's own server runs on the board (``recipes/tvm_server``), and ``rpc_worker`` connects to this server.
- **loader**: a small program (``loader/``) is sent to the board and loads a kernel through a plain C interface. The
  loader is used for boards without a TVM runtime (armv7) and for QPU kernels.

``rpc_worker`` runs with TVM in a separate process, so a crash or hang in TVM cannot affect the task. The modules that
``rpc_worker`` imports (``compiling``, ``comparing``, ``reporting``) import no modules of this project except each
other.
"""
