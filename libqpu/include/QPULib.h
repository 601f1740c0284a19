// The complete kernel language under the names that QPULib uses: global types and functions, and
// the macros If, Else, While, For, Where and End. Include this header after the headers of other
// libraries, because the macros have common names.
#ifndef QPULIB_H
#define QPULIB_H

#include "qpu/macros.h"
#include "qpu/qpu.hpp"

using qpu::BoolExpr;
using qpu::Cond;
using qpu::Float;
using qpu::FloatExpr;
using qpu::Int;
using qpu::IntExpr;
using qpu::Kernel;
using qpu::Ptr;
using qpu::PtrExpr;
using qpu::SharedArray;

using qpu::abs;
using qpu::all;
using qpu::any;
using qpu::asFloat;
using qpu::asInt;
using qpu::broadcast;
using qpu::compile;
using qpu::exp2;
using qpu::gather;
using qpu::index;
using qpu::log2;
using qpu::max;
using qpu::me;
using qpu::min;
using qpu::mul24;
using qpu::numQPUs;
using qpu::Print;
using qpu::receive;
using qpu::recip;
using qpu::ror;
using qpu::rotate;
using qpu::rsqrt;
using qpu::semaDec;
using qpu::semaInc;
using qpu::setReadStride;
using qpu::setWriteStride;
using qpu::shr;
using qpu::store;
using qpu::toFloat;
using qpu::toInt;

using qpu::dmaSetReadPitch;
using qpu::dmaSetupRead;
using qpu::dmaSetupWrite;
using qpu::dmaSetWriteStride;
using qpu::dmaStartRead;
using qpu::dmaStartWrite;
using qpu::dmaWaitRead;
using qpu::dmaWaitWrite;
using qpu::HORIZ;
using qpu::VERT;
using qpu::vpmGetFloat;
using qpu::vpmGetInt;
using qpu::vpmPut;
using qpu::vpmSetupRead;
using qpu::vpmSetupWrite;

#endif
