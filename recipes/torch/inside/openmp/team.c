// The only OpenMP region of libtorch_cpu: what the patch "one OpenMP region" calls. C, so that GCC compiles it for its own
// run-time library, libgomp, whichever compiler the C++ sources have.
#include <omp.h>

void at_omp_team(void (*part)(void *shared, int member, int members), void *shared);

void at_omp_team(void (*part)(void *shared, int member, int members), void *shared)
{
#pragma omp parallel
    part(shared, omp_get_thread_num(), omp_get_num_threads());
}
