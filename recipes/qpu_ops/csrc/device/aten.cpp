// A single translation unit for the sources that need most of ATen's headers, because parsing
// these headers takes longer than compiling the sources.
#include "cells.cpp"
#include "device.cpp"
#include "images.cpp"
#include "losses.cpp"
#include "operators.cpp"
#include "staging.cpp"
