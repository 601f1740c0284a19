/* qpu.h is plain C. */
#include <stdio.h>
#include <string.h>

#include "qpu.h"

int main(void) {
  const char *name = qpu_backend_name();
  if (name == NULL || strcmp(name, "interpreter") != 0) {
    fprintf(stderr, "backend: %s\n", qpu_backend_reason());
    return 1;
  }
  return strchr(qpu_version(), '.') == NULL;
}
