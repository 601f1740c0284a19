// A second translation unit for sources that need most of ATen's headers (see aten.cpp).
#include "activations.cpp"
#include "layers.cpp"
#include "layout.cpp"
#include "lists.cpp"
