"""The board: the labgrid target that boots or reaches it, the suite that runs on it, and what is reported of that."""
