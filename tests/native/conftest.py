"""What the PC alone runs: breadth that would take hours on a machine that is emulated."""
