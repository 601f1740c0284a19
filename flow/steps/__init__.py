"""One module per step. Its function ``step(context)`` returns the step: its inputs, dependencies and action."""
