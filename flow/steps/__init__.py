"""One module per step. ``step(context)`` describes it: its inputs, the steps that it needs, and what it does."""
