"""Card images: make one from the system image, and write one to a card."""
