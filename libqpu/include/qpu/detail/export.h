// Symbol visibility of libqpu.so: everything else in the library is hidden.
#ifndef QPU_DETAIL_EXPORT_H
#define QPU_DETAIL_EXPORT_H

#if defined(__GNUC__)
#define QPU_API __attribute__((visibility("default")))
#else
#define QPU_API
#endif

#endif
