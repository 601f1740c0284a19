"""Kernels on boards: compiled on the host, run and timed on the board, and compared with a reference.

``profiling`` supports two transports to a board:

- **RPC**: TVM's own server runs on the board (``board_server``), and ``rpc_worker`` connects to it.
- **loader**: a small program (``loader/``) is sent to the board and loads a kernel through a plain C interface. It is
  used for boards without a TVM runtime (armv7) and for QPU kernels.

``rpc_worker`` runs in a separate process with TVM, so a crash or hang of TVM cannot affect the task. The modules that
it imports (``compiling``, ``comparing``, ``reporting``) import no other module of this project.
"""
