// The sources that need most of ATen's headers, as one: reading those takes longer than
// compiling what is in these.
#include "cells.cpp"
#include "device.cpp"
#include "images.cpp"
#include "losses.cpp"
#include "operators.cpp"
#include "staging.cpp"
