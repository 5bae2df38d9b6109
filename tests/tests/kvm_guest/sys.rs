//! The guest's program.
//!
//! It is assembled by the compiler into a read-only section of the test's binary and copied into the guest from there:
//! no assembler to install, no build script, and mnemonics and labels instead of bytes. It runs at another address than
//! it was linked for, so it has relative jumps only, and every address comes from a register.
//!
//! A software KVM takes about a microsecond per instruction and knows the plain integer ones only; there are no others.
//!
//! Processor 0 reports pages, waits for the device, checks everything it owns and takes the reported pages back.
//! Processor 1 meanwhile goes through pages of its own, checks each and writes a new pattern.

use crate::program::{
    AVAIL, BASE, DONE, DOORBELL, FIRST, FOUND, GENERATIONS, HUGE_PAGE, HUGE_PAGES, MISMATCH, OWNED, PAGE, QUEUE_SIZE,
    READY, REPORTED, ROUNDS, STOP, SWEEPS, USED,
};
use std::arch::global_asm;

global_asm!(
    ".pushsection .rodata.fpr_kvm_guest, \"a\", @progbits",
    "fpr_kvm_guest_start:",
    // rdi: which processor this is. r15: the shared words. r14: the huge pages owned. rbx: a huge page.
    "   mov r15d, {BASE}",
    "   mov r14, [r15 + {OWNED} + rdi*8]",
    "   xor ebx, ebx",
    "10: bt r14, rbx",
    "   jnc 11f",
    "   mov eax, 1",
    "   call 90f",
    "11: inc ebx",
    "   cmp ebx, {HUGE_PAGES}",
    "   jb 10b",
    "   mov r12d, 1", // the round, or the sweep
    "   test edi, edi",
    "   jnz 60f",
    "12: pause",
    "   cmp qword ptr [r15 + {READY}], 0",
    "   je 12b",
    //
    // One round. rbp: what is reported.
    "20: mov rbp, [r15 + {REPORTED} + r12*8]",
    // One chain from descriptor 0 on: a huge page each, write-only.
    "   xor ebx, ebx",
    "   xor r10d, r10d",
    "   mov r11, r15",
    "21: bt rbp, rbx",
    "   jnc 22f",
    "   mov rdx, rbx",
    "   shl rdx, 21",
    "   add rdx, {FIRST}",
    "   mov [r11], rdx",
    "   mov dword ptr [r11 + 8], {HUGE_PAGE}",
    "   mov word ptr [r11 + 12], 3", // NEXT | WRITE
    "   inc r10d",
    "   mov [r11 + 14], r10w",
    "   add r11, 16",
    "22: inc ebx",
    "   cmp ebx, {HUGE_PAGES}",
    "   jb 21b",
    "   mov word ptr [r11 - 4], 2", // the last one: WRITE
    "   mov ecx, r12d",
    "   dec ecx",
    "   and ecx, {QUEUE_SIZE} - 1",
    "   mov word ptr [r15 + {AVAIL} + 4 + rcx*2], 0",
    "   mov [r15 + {AVAIL} + 2], r12w",
    "   out {DOORBELL}, al",
    "30: pause",
    "   cmp [r15 + {USED} + 2], r12w",
    "   jne 30b",
    // The used element: head 0, nothing written.
    "   lea rdx, [r15 + {USED} + 4 + rcx*8]",
    "   xor r8d, r8d",
    "   mov r9, [rdx]",
    "   cmp r9, r8",
    "   jne 99f",
    // What was reported reads zero, all else as it was left.
    "   xor ebx, ebx",
    "40: bt r14, rbx",
    "   jnc 42f",
    "   mov rax, [r15 + {GENERATIONS} + rbx*8]",
    "   bt rbp, rbx",
    "   jnc 41f",
    "   xor eax, eax",
    "41: call 95f",
    "42: inc ebx",
    "   cmp ebx, {HUGE_PAGES}",
    "   jb 40b",
    // Take the reported ones back.
    "   xor ebx, ebx",
    "50: bt rbp, rbx",
    "   jnc 51f",
    "   lea eax, [r12 + 1]",
    "   call 90f",
    "51: inc ebx",
    "   cmp ebx, {HUGE_PAGES}",
    "   jb 50b",
    "   inc r12d",
    "   cmp r12, [r15 + {ROUNDS}]",
    "   jbe 20b",
    "   mov qword ptr [r15 + {STOP}], 1",
    "   jmp 70f",
    //
    // Processor 1: sweeps until it is told to stop.
    "60: mov qword ptr [r15 + {READY}], 1",
    "61: xor ebx, ebx",
    "62: bt r14, rbx",
    "   jnc 63f",
    "   mov rax, [r15 + {GENERATIONS} + rbx*8]",
    "   call 95f",
    "   lea eax, [r12 + 1]",
    "   call 90f",
    "63: inc ebx",
    "   cmp ebx, {HUGE_PAGES}",
    "   jb 62b",
    "   inc r12d",
    "   inc qword ptr [r15 + {SWEEPS}]",
    "   cmp qword ptr [r15 + {STOP}], 0",
    "   je 61b",
    //
    // Both: everything once more, then the end.
    "70: xor ebx, ebx",
    "71: bt r14, rbx",
    "   jnc 72f",
    "   mov rax, [r15 + {GENERATIONS} + rbx*8]",
    "   call 95f",
    "72: inc ebx",
    "   cmp ebx, {HUGE_PAGES}",
    "   jb 71b",
    "   out {DONE}, al",
    "   hlt",
    //
    // Fill huge page rbx with generation rax.
    "90: mov [r15 + {GENERATIONS} + rbx*8], rax",
    "   shl rax, 32",
    "   mov rdx, rbx",
    "   shl rdx, 21",
    "   add rdx, {FIRST}",
    "   or rax, rdx",
    "   mov ecx, {HUGE_PAGE} / {PAGE}",
    "91: mov [rdx], rax",
    "   add rdx, {PAGE}",
    "   add rax, {PAGE}",
    "   dec ecx",
    "   jnz 91b",
    "   ret",
    // Check huge page rbx for generation rax, or for zeros if that is 0. r8: expected, r9: found.
    "95: mov rdx, rbx",
    "   shl rdx, 21",
    "   add rdx, {FIRST}",
    "   xor r8d, r8d",
    "   xor r13d, r13d", // what is added per page
    "   test rax, rax",
    "   jz 96f",
    "   mov r8, rax",
    "   shl r8, 32",
    "   or r8, rdx",
    "   mov r13d, {PAGE}",
    "96: mov ecx, {HUGE_PAGE} / {PAGE}",
    "97: mov r9, [rdx]",
    "   cmp r9, r8",
    "   jne 99f",
    "   add rdx, {PAGE}",
    "   add r8, r13",
    "   dec ecx",
    "   jnz 97b",
    "   ret",
    // rdx: where.
    "99: shl rdi, 5",
    "   mov [r15 + {FOUND} + rdi], rdx",
    "   mov [r15 + {FOUND} + rdi + 8], r8",
    "   mov [r15 + {FOUND} + rdi + 16], r9",
    "   out {MISMATCH}, al",
    "   hlt",
    "fpr_kvm_guest_end:",
    ".popsection",
    AVAIL = const AVAIL,
    BASE = const BASE,
    DONE = const DONE,
    DOORBELL = const DOORBELL,
    FIRST = const FIRST,
    FOUND = const FOUND,
    GENERATIONS = const GENERATIONS,
    HUGE_PAGE = const HUGE_PAGE,
    HUGE_PAGES = const HUGE_PAGES,
    MISMATCH = const MISMATCH,
    OWNED = const OWNED,
    PAGE = const PAGE,
    QUEUE_SIZE = const QUEUE_SIZE,
    READY = const READY,
    REPORTED = const REPORTED,
    ROUNDS = const ROUNDS,
    STOP = const STOP,
    SWEEPS = const SWEEPS,
    USED = const USED,
);

unsafe extern "C" {
    #[link_name = "fpr_kvm_guest_start"]
    static START: u8;
    #[link_name = "fpr_kvm_guest_end"]
    static END: u8;
}

/// The program's bytes.
pub(crate) fn program() -> &'static [u8] {
    let (start, end) = (&raw const START, &raw const END);
    // SAFETY: both labels are in the one section above, `END` behind `START`, and the linker keeps a section in one
    // piece. So between them lie that many initialised bytes of this binary's read-only data, which nobody writes to and
    // which stay mapped as long as the program runs.
    unsafe { std::slice::from_raw_parts(start, end as usize - start as usize) }
}
