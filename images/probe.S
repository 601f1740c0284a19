/* The 32-bit ARM program that doctor executes: no libc, no data, runs at any address.
 *
 * Without arguments it writes a line to stdout and ends with status 0.
 *
 * With a directory as its argument it lists that directory with getdents64, and applies the rule that the C library's
 * 32-bit readdir applies to each entry: inode number and offset must fit its 32-bit fields. It ends with
 *     0   at least 66 entries were seen, and all fit
 *     2   the directory cannot be opened
 *     3   getdents64 failed
 *     4   the listing ended early
 *     75  an entry does not fit; errno EOVERFLOW of readdir(3)
 *
 * System call numbers: arch/arm/tools/syscall.tbl of Linux. struct linux_dirent64 (getdents(2)): inode number, 8
 * bytes; offset of the next entry, 8 bytes; length of this record, 2 bytes; type; name.
 *
 * Assembled form: images/probe.py. To regenerate it:
 *     arm-linux-gnueabihf-gcc -nostdlib -c probe.S && arm-linux-gnueabihf-objcopy -O binary probe.o probe.bin
 */
    .syntax unified
    .arch   armv7-a
    .arm
    .text
    .global _start
_start:
    ldr     r4, [sp]            @ argc
    cmp     r4, #2
    bge     list

    mov     r0, #1              @ write(1, message, 21)
    adr     r1, message
    mov     r2, #21
    mov     r7, #4
    svc     #0
    mov     r0, #0
    b       exit

list:
    ldr     r0, [sp, #8]        @ open(argv[1], O_RDONLY | O_DIRECTORY)
    mov     r1, #0x4000
    mov     r2, #0
    mov     r7, #5
    svc     #0
    cmp     r0, #0
    movlt   r0, #2
    blt     exit
    mov     r5, r0
    mov     r10, #0             @ entries seen
    sub     sp, sp, #4096

more:
    mov     r0, r5              @ getdents64(directory, buffer, 4096)
    mov     r1, sp
    mov     r2, #4096
    mov     r7, #217
    svc     #0
    cmp     r0, #0
    movlt   r0, #3
    blt     exit
    beq     ended
    mov     r6, sp              @ this entry
    add     r8, sp, r0          @ end of the entries

entry:
    ldr     r1, [r6, #4]        @ upper half of the inode number
    cmp     r1, #0
    bne     overflow
    ldr     r1, [r6, #8]        @ the offset must be the sign extension of its lower half
    ldr     r2, [r6, #12]
    cmp     r2, r1, asr #31
    bne     overflow
    add     r10, r10, #1
    ldrh    r1, [r6, #16]
    add     r6, r6, r1
    cmp     r6, r8
    blo     entry
    b       more

overflow:
    mov     r0, #75
    b       exit

ended:
    cmp     r10, #66
    movge   r0, #0
    movlt   r0, #4

exit:
    mov     r7, #1
    svc     #0

message:
    .ascii  "32-bit ARM code runs\n"
    .balign 4, 0
