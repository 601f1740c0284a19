"""Make card images from the system image, and write them to cards."""
