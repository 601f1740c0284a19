"""What we compile: a folder per artefact."""
