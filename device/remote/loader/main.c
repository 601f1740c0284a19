/* Runs an exported model once. Build the program in this folder, with the board's compiler:
 *   cc main.c -o example -L. -lmodel -Wl,-rpath,'$ORIGIN'
 *   ./example model.params input0.bin ... output0.bin ...
 * The inputs and outputs are files that contain dense arrays, without a header. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "model.h"

static int fail(const char *what) { return perror(what), 1; }

int main(int count, char **words) {
  int in = 0, out = 0;
  while (pitorch_model_input_bytes(in) > 0) in++;
  while (pitorch_model_output_bytes(out) > 0) out++;
  if (count != 2 + in + out) return fprintf(stderr, "expected the parameters, %d inputs, %d outputs\n", in, out), 2;

  const int file = open(words[1], O_RDONLY);
  if (file < 0) return fail(words[1]);
  const size_t bytes = pitorch_model_parameter_bytes();
  if (lseek(file, 0, SEEK_END) != (off_t)bytes)
    return fprintf(stderr, "%s: expected %zu bytes, the parameters of this model\n", words[1], bytes), 1;
  void *arrays[count], *parameters = bytes > 0 ? mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, file, 0) : NULL;
  if (parameters == MAP_FAILED) return fail(words[1]);
  for (int i = 0; i < in + out; i++) {
    const size_t size = i < in ? pitorch_model_input_bytes(i) : pitorch_model_output_bytes(i - in);
    if (posix_memalign(&arrays[i], PITORCH_MODEL_ALIGNMENT, size) != 0) return fail("memory");
    FILE *from = i < in ? fopen(words[2 + i], "rb") : NULL;
    if (i < in && (from == NULL || fread(arrays[i], 1, size, from) != size || fclose(from) != 0)) return fail(words[2 + i]);
  }
  if (pitorch_model_run(parameters, (const void *const *)arrays, arrays + in, NULL) != 0)
    return fprintf(stderr, "%s\n", pitorch_model_error()), 1;
  for (int i = in; i < in + out; i++) {
    FILE *to = fopen(words[2 + i], "wb");
    const size_t size = pitorch_model_output_bytes(i - in);
    if (to == NULL || fwrite(arrays[i], 1, size, to) != size || fclose(to) != 0) return fail(words[2 + i]);
  }
  return 0;
}
