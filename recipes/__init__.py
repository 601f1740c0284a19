"""The recipes: one folder for each compiled artefact."""
