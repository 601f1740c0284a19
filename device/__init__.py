"""Boards: the labgrid target that boots or connects to a board, the device suite, and the suite's reports."""
