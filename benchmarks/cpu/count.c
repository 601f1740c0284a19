/* A QEMU TCG plugin that counts the executions of each translation block of an ARM process, 32-bit or 64-bit.
 *
 *     qemu-arm -plugin count.so,out=FILE PROGRAM
 *
 * The program marks regions with close(MARK + n): n > 0 starts region n, n = 0 ends it. At the end of a region the plugin
 * writes
 *
 *     region NUMBER RESIDENT_KIB
 *     executed BLOCK TIMES             (one line per executed block)
 *
 * and at the end of the process, for each block that was executed in a region,
 *
 *     block NUMBER ADDRESS
 *     code BYTES DISASSEMBLY           (one line per instruction)
 *
 * The last line is "end".
 *
 * RESIDENT_KIB is the resident memory in the program's own address range, without the emulator's memory. It is 0 for a
 * 64-bit program, which has no separate address range.
 *
 * Each time a block starts, all its instructions are counted. Counts are exact for a process with one thread.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MARK 0x43500000
#define LAST_REGION 0xffff
#define BUCKETS 65536
#define TEXT 65536

/* Functions of QEMU's plugin interface, declared as in its documentation, because no Debian package has the header. */
EXPORT int qemu_plugin_version = 1;

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { ADD_U64 = 0 };

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn);
void *qemu_plugin_insn_haddr(const struct qemu_plugin_insn *insn);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *insn);
char *qemu_plugin_insn_disas(const struct qemu_plugin_insn *insn);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *insn);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, void (*call)(qemu_plugin_id_t, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *tb, int operation, void *to, uint64_t addend);
void qemu_plugin_register_vcpu_syscall_cb(qemu_plugin_id_t id,
                                          void (*call)(qemu_plugin_id_t, unsigned, int64_t, uint64_t, uint64_t, uint64_t,
                                                       uint64_t, uint64_t, uint64_t, uint64_t, uint64_t));
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, void (*call)(qemu_plugin_id_t, void *), void *data);

struct block {
    struct block *next_in_bucket;
    struct block *next;
    uint64_t address;
    uint64_t executions;
    unsigned number;
    bool reported;
    char text[];
};

static struct block *buckets[BUCKETS];
static struct block *first;
static struct block **last = &first;
static unsigned blocks;
static FILE *out;
static pid_t owner;
static uint64_t guest_base;
static bool guest_base_known;
static unsigned region;
static bool wide;         /* a 64-bit program */
static int64_t close_call; /* the number of the system call close */

static void *allocate(size_t size) {
    void *made = calloc(1, size);
    if (!made) {
        fprintf(stderr, "count.so: out of memory\n");
        abort();
    }
    return made;
}

static size_t append_instruction(char *text, size_t room, const struct qemu_plugin_insn *insn) {
    uint8_t bytes[4] = {0};
    size_t size = qemu_plugin_insn_size(insn);
    if (size > sizeof bytes) {
        size = sizeof bytes;
    }
    memcpy(bytes, qemu_plugin_insn_data(insn), size);
    size_t used = (size_t)snprintf(text, room, "code ");
    for (size_t at = 0; at < size; at++) {
        used += (size_t)snprintf(text + used, room - used, "%02x", bytes[at]);
    }
    char *shown = qemu_plugin_insn_disas(insn);
    used += (size_t)snprintf(text + used, room - used, " %s\n", shown ? shown : "");
    free(shown);
    return used;
}

static struct block *find(uint64_t address, const char *text) {
    struct block **bucket = &buckets[(address >> 1) % BUCKETS];
    for (struct block *found = *bucket; found; found = found->next_in_bucket) {
        if (found->address == address && !strcmp(found->text, text)) {
            return found;
        }
    }
    struct block *made = allocate(sizeof *made + strlen(text) + 1);
    made->address = address;
    made->number = blocks++;
    strcpy(made->text, text);
    made->next_in_bucket = *bucket;
    *bucket = made;
    *last = made;
    last = &made->next;
    return made;
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb) {
    (void)id;
    static char text[TEXT];
    size_t used = 0;
    size_t count = qemu_plugin_tb_n_insns(tb);
    struct qemu_plugin_insn *start = qemu_plugin_tb_get_insn(tb, 0);
    if (!guest_base_known && qemu_plugin_insn_haddr(start)) {
        guest_base = (uint64_t)(uintptr_t)qemu_plugin_insn_haddr(start) - qemu_plugin_insn_vaddr(start);
        guest_base_known = true;
    }
    text[0] = '\0';
    /* A block has at most 512 instructions, and a line at most 128 characters. */
    for (size_t at = 0; at < count && used + 128 < TEXT; at++) {
        used += append_instruction(text + used, TEXT - used, qemu_plugin_tb_get_insn(tb, at));
    }
    struct block *found = find(qemu_plugin_insn_vaddr(start), text);
    qemu_plugin_register_vcpu_tb_exec_inline(tb, ADD_U64, &found->executions, 1);
}

static uint64_t resident_kib(void) {
    FILE *maps = fopen("/proc/self/smaps", "re");
    char line[4096];
    bool of_guest = false;
    uint64_t total = 0;
    while (maps && !wide && fgets(line, sizeof line, maps)) {
        uint64_t start, end, size;
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " ", &start, &end) == 2) {
            of_guest = start >= guest_base && end <= guest_base + (UINT64_C(1) << 32);
        } else if (of_guest && sscanf(line, "Rss: %" SCNu64 " kB", &size) == 1) {
            total += size;
        }
    }
    if (maps) {
        fclose(maps);
    }
    return total;
}

static void end_region(void) {
    fprintf(out, "region %u %" PRIu64 "\n", region, resident_kib());
    for (struct block *at = first; at; at = at->next) {
        if (at->executions) {
            at->reported = true;
            fprintf(out, "executed %u %" PRIu64 "\n", at->number, at->executions);
        }
    }
    fflush(out); /* a forked process must not write the buffered text again */
    region = 0;
}

static void called(qemu_plugin_id_t id, unsigned cpu, int64_t number, uint64_t a1, uint64_t a2, uint64_t a3, uint64_t a4,
                   uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8) {
    (void)id, (void)cpu, (void)a2, (void)a3, (void)a4, (void)a5, (void)a6, (void)a7, (void)a8;
    uint32_t mark = (uint32_t)a1;
    if (number != close_call || mark < MARK || mark > MARK + LAST_REGION || getpid() != owner) {
        return;
    }
    if (region) {
        end_region();
    }
    region = mark - MARK;
    for (struct block *at = first; at; at = at->next) {
        at->executions = 0;
    }
}

static void ended(qemu_plugin_id_t id, void *data) {
    (void)id, (void)data;
    if (getpid() != owner) {
        return;
    }
    for (struct block *at = first; at; at = at->next) {
        if (at->reported) {
            fprintf(out, "block %u %" PRIx64 "\n%s", at->number, at->address, at->text);
        }
    }
    fprintf(out, "end\n");
    fclose(out);
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv) {
    /* The first member of QEMU's qemu_info_t is the name of the emulated CPU. */
    wide = !strcmp(*(const char *const *)info, "aarch64");
    close_call = wide ? 57 : 6;
    if (argc != 1 || strncmp(argv[0], "out=", 4) != 0 || !(out = fopen(argv[0] + 4, "we"))) {
        fprintf(stderr, "count.so: expected the argument out=FILE, where FILE is writable\n");
        return -1;
    }
    owner = getpid();
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_vcpu_syscall_cb(id, called);
    qemu_plugin_register_atexit_cb(id, ended, NULL);
    return 0;
}
