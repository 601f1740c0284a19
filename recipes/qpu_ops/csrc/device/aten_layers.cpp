// More sources that need most of ATen's headers, as one; see aten.cpp.
#include "activations.cpp"
#include "layers.cpp"
#include "layout.cpp"
#include "lists.cpp"
