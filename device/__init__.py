"""Boards: the labgrid target that boots or reaches a board, the device suite that runs on it, and its reports."""
