"""One module per step; the module's function ``step(context)`` returns the step's inputs, dependencies and action."""
