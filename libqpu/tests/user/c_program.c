/* Uses qpu.h in plain C: allocates memory, assembles, runs and lists a program, and reads its
 * cycles. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "qpu.h"

static int failures = 0;

static void check(int holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "%s; last error: %s %s\n", what, qpu_last_error_class(), qpu_last_error());
  ++failures;
}

/* QPU n stores the sum of its uniforms a and b in all 16 words of its row. */
static const char *const kText =
    "# uniforms: a, b, address of the row, number of the row in the VPM\n"
    "or r0, uniform, uniform; nop\n";

static const char *const kProgram =
    "mov r0, uniform\n"
    "add r0, r0, uniform\n"
    "mov r1, uniform              # address of the row\n"
    "ldi r2, 0x1a00\n"
    "mov r3, uniform              # number of the row in the VPM\n"
    "add vpm_wr_setup, r2, r3\n"
    "mov vpm, r0\n"
    "ldi r2, 0x80904000\n"
    "shl r3, r3, 7\n"
    "\n"
    "add vpm_wr_setup, r2, r3\n"
    "mov vpm_st_addr, r1\n"
    "nop; read vpm_st_wait\n"
    "nop; thrend\n"
    "nop\n"
    "nop\n";

static void run(void) {
  uint64_t words[32];
  uint32_t uniforms[3 * 4];
  uint32_t result[3 * 16];
  struct qpu_cycles cycles;
  const uint64_t *kept = NULL;
  int i;
  const long count = qpu_assemble(kProgram, words, 32);
  qpu_buffer *buffer = qpu_buffer_new(sizeof result);
  qpu_program *program = qpu_program_from_words(words, (size_t)count, "rows");
  check(count == 15, "the program has 15 words");
  check(buffer != NULL && program != NULL, "buffer and program exist");
  if (buffer == NULL || program == NULL) return;
  check(qpu_buffer_bytes(buffer) == sizeof result, "the buffer has the requested size");
  check(qpu_buffer_address(buffer) % 64 == 0, "the buffer is aligned");
  check(strcmp(qpu_program_name(program), "rows") == 0, "the program keeps its name");
  check(qpu_program_words(program, &kept) == 15 && kept[0] == words[0], "the program keeps its words");
  check(qpu_program_parameters(program) == 0 && !qpu_program_uses_sfu(program), "the program has no parameters and uses no SFU");
  check(qpu_program_cycles(program, &cycles) == -1, "no cycles before a run");
  check(qpu_thread_cycles(NULL) == -1, "a null pointer for cycles is rejected");
  for (i = 0; i < 3; ++i) {
    uniforms[4 * i] = 100;
    uniforms[4 * i + 1] = (uint32_t)i;
    uniforms[4 * i + 2] = qpu_buffer_address(buffer) + 64 * (uint32_t)i;
    uniforms[4 * i + 3] = (uint32_t)i;
  }
  qpu_program_profile(program, 1);
  check(qpu_program_run_raw(program, 3, uniforms, 4) == 0, "the program runs");
  check(qpu_buffer_read(buffer, 0, result, sizeof result) == 0, "the result is read");
  for (i = 0; i < 48; ++i)
    check(result[i] == 100 + (uint32_t)i / 16, "a word is the sum of the uniforms");
  check(((const uint32_t *)qpu_buffer_data(buffer))[47] == 102, "the CPU reads the result");
  check(qpu_program_cycles(program, &cycles) == 0 && cycles.instructions == 45 &&
            cycles.clocks >= 60 && cycles.seconds > 0 && cycles.memory_write_bytes == 192,
        "45 instructions, 192 bytes");
  struct qpu_cycles all;
  check(qpu_thread_cycles(&all) == 0 && all.instructions >= cycles.instructions &&
            all.clocks >= cycles.clocks && strcmp(all.board, cycles.board) == 0,
        "the thread's sums include this run");

  char *listing = qpu_program_listing(program);
  check(listing != NULL && strstr(listing, "vpm_st_addr") != NULL &&
            strstr(listing, "not measured on hardware") != NULL,
        "the listing has the model's figures");
  qpu_free(listing);
  char *text = qpu_disassemble(words, 15);
  check(text != NULL && strstr(text, "shl r3, r3, 7") != NULL, "the words are listed");
  qpu_free(text);

  check(qpu_program_run_raw(program, 13, uniforms, 0) == -1 &&
            strcmp(qpu_last_error_class(), "ArgumentError") == 0,
        "13 QPUs are rejected");
  check(qpu_program_run(program, 1, uniforms, 2) == -1 &&
            strstr(qpu_last_error(), "takes 0 arguments, found 2") != NULL,
        "arguments are counted");
  uniforms[2] = 0x1000;
  check(qpu_program_run_raw(program, 1, uniforms, 4) == -1 &&
            strcmp(qpu_last_error_class(), "BoundsError") == 0,
        "a store outside of all memory is rejected");
  check(qpu_buffer_write(buffer, 188, result, 8) == -1, "a copy past the end is rejected");
  check(qpu_buffer_write(buffer, 2, result, 4) == -1, "a copy of half words is rejected");
  check(qpu_buffer_write(NULL, 0, result, 4) == -1 && strstr(qpu_last_error(), "NULL") != NULL,
        "NULL is reported");
  qpu_program_delete(program);
  qpu_buffer_delete(buffer);
}

static void files(const char *folder) {
  char path[512];
  uint64_t words[32];
  const long count = qpu_assemble(kProgram, words, 32);
  qpu_program *program = qpu_program_from_words(words, (size_t)count, "rows");
  snprintf(path, sizeof path, "%s/c_program.qpuo", folder);
  check(qpu_program_save(program, path) == 0, "the program is saved");
  qpu_program_delete(program);
  program = qpu_program_open(path);
  check(program != NULL && strcmp(qpu_program_name(program), "rows") == 0, "the program is opened");
  qpu_program_delete(program);
  /* Change one byte of the name. */
  FILE *file = fopen(path, "r+b");
  check(file != NULL && fseek(file, 28, SEEK_SET) == 0 && fputc(0xff, file) == 0xff,
        "a byte is damaged");
  if (file != NULL) fclose(file);
  program = qpu_program_open(path);
  check(program == NULL && strstr(qpu_last_error(), "is damaged") != NULL &&
            strcmp(qpu_last_error_class(), "ArgumentError") == 0,
        "a damaged kernel is rejected");
  check(qpu_program_listing(program) == NULL && strstr(qpu_last_error(), "NULL") != NULL,
        "it has no listing");
  remove(path);
  check(qpu_program_open(path) == NULL && strstr(qpu_last_error(), path) != NULL,
        "a missing file is reported");
  program = qpu_program_from_bytes(words, 8 * (size_t)count, NULL);
  check(qpu_program_words(program, NULL) == (size_t)count, "raw words are a program");
  qpu_program_delete(program);
  check(qpu_program_from_bytes(words, 9, NULL) == NULL, "9 bytes are not a program");
  check(qpu_program_from_words(words, 0, NULL) == NULL, "no words are not a program");
  check(qpu_assemble("nop\nfadd r0\n", words, 32) == -1 &&
            strstr(qpu_last_error(), "line 2") != NULL,
        "the error names the invalid line");
  check(qpu_assemble(kText, words, 0) == 1, "without a buffer the words are counted");
}

static void model(void) {
  double value = 0;
  char *text = qpu_model_parameters();
  check(text != NULL && strstr(text, "\nmemory_bytes_per_s = ") != NULL, "the model is text");
  qpu_free(text);
  check(qpu_model_parameter("memory_bytes_per_s", &value) == 0 && value > 1e9,
        "one parameter is a number");
  check(qpu_model_parameter("memory", &value) == -1 &&
            strstr(qpu_last_error(), "'memory' is not a parameter") != NULL,
        "an unknown parameter is rejected");
}

int main(int argc, char **argv) {
  const char *name = qpu_backend_name();
  if (name == NULL || strcmp(name, "interpreter") != 0) {
    fprintf(stderr, "backend: %s\n", qpu_backend_reason());
    return 1;
  }
  check(strchr(qpu_version(), '.') != NULL, "the version has parts");
  run();
  model();
  files(argc > 1 ? argv[1] : ".");
  char *report = qpu_machine_report("/", 1);
  check(report != NULL && report[0] == '{', "the report is an object");
  qpu_free(report);
  qpu_free(NULL);
  return failures != 0;
}
