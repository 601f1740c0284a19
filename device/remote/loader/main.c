/* Runs an exported model once. Build the program in this folder, with the board's compiler:
 *   cc main.c -o example -L. -lmodel -Wl,-rpath,'$ORIGIN'
 *   ./example model.params input0.bin ... output0.bin ... */
#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "model.h"

enum { INPUTS = PITORCH_MODEL_INPUTS, OUTPUTS = PITORCH_MODEL_OUTPUTS };

/* Maps a file into memory, at the start of a page. An empty file also gets an address. */
static const void *map(const char *name, size_t bytes) {
  const int file = open(name, O_RDONLY);
  if (file < 0) err(1, "%s", name);
  if (lseek(file, 0, SEEK_END) != (off_t)bytes) errx(1, "%s: expected %zu bytes", name, bytes);
  const void *memory = mmap(NULL, bytes > 0 ? bytes : 1, PROT_READ, MAP_PRIVATE, file, 0);
  if (memory == MAP_FAILED) err(1, "%s", name);
  return memory;
}

int main(int count, char **words) {
  if (count != 2 + INPUTS + OUTPUTS)
    errx(2, "expected the files of parameters, inputs (%d) and outputs (%d)", INPUTS, OUTPUTS);
  const void *parameters = map(words[1], pitorch_model_parameter_bytes()), *inputs[INPUTS + 1];
  void *outputs[OUTPUTS + 1];
  for (int i = 0; i < INPUTS; i++) inputs[i] = map(words[2 + i], pitorch_model_input_bytes(i));
  for (int i = 0; i < OUTPUTS; i++)
    if (posix_memalign(&outputs[i], PITORCH_MODEL_ALIGNMENT, pitorch_model_output_bytes(i)) != 0)
      errx(1, "not enough memory");
  if (pitorch_model_run(parameters, inputs, outputs, NULL)) errx(1, "%s", pitorch_model_error());
  for (int i = 0; i < OUTPUTS; i++) {
    const size_t bytes = pitorch_model_output_bytes(i);
    FILE *file = fopen(words[2 + INPUTS + i], "wb");
    if (file == NULL || fwrite(outputs[i], 1, bytes, file) != bytes || fclose(file) != 0)
      err(1, "%s", words[2 + INPUTS + i]);
  }
}
