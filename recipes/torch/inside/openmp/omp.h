// OpenMP's functions that torch's C++ sources call, for a compiler that is not GCC: libgomp's own header is for GCC alone.
// Names and types are the standard's (OpenMP 4.5, section 3.2).
#pragma once

#ifdef __cplusplus
extern "C" {
#endif
extern int omp_get_max_threads(void);
extern int omp_get_num_threads(void);
extern int omp_get_thread_num(void);
extern int omp_in_parallel(void);
extern void omp_set_num_threads(int threads);
#ifdef __cplusplus
}
#endif
