// The complete kernel language in namespace qpu, without macros.
#ifndef QPU_QPU_HPP
#define QPU_QPU_HPP

#include "qpu/backend.h"
#include "qpu/condition.h"
#include "qpu/error.h"
#include "qpu/kernel.h"
#include "qpu/math.h"
#include "qpu/shared_array.h"
#include "qpu/statement.h"
#include "qpu/vector.h"
#include "qpu/vpm.h"

#endif
