// The only OpenMP region of libtorch_cpu; it is called by the code of patch 0004. It is in C, so that GCC compiles it for its
// runtime, libgomp, even if Clang compiles the C++ sources.
#include <omp.h>

void at_omp_team(void (*part)(void *shared, int member, int members), void *shared);

void at_omp_team(void (*part)(void *shared, int member, int members), void *shared)
{
#pragma omp parallel
    part(shared, omp_get_thread_num(), omp_get_num_threads());
}
