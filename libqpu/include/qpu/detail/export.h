// Symbol visibility of libqpu.so. All other symbols are hidden.
#ifndef QPU_DETAIL_EXPORT_H
#define QPU_DETAIL_EXPORT_H

#if defined(__GNUC__)
#define QPU_API __attribute__((visibility("default")))
#else
#define QPU_API
#endif

#endif
