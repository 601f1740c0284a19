// One translation unit for the sources that need most of ATen's headers: parsing the headers
// takes longer than compiling these sources.
#include "cells.cpp"
#include "device.cpp"
#include "images.cpp"
#include "losses.cpp"
#include "operators.cpp"
#include "staging.cpp"
