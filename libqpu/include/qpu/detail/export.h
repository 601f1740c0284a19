// The visibility of symbols in libqpu.so. Only symbols that are declared with QPU_API are exported.
#ifndef QPU_DETAIL_EXPORT_H
#define QPU_DETAIL_EXPORT_H

#if defined(__GNUC__)
#define QPU_API __attribute__((visibility("default")))
#else
#define QPU_API
#endif

#endif
