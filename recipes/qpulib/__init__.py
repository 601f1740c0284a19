"""Build upstream's QPULib in the same way as upstream's own build does, for use instead of libqpu."""
