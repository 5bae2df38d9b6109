//! What the guest's program and its host agree on: where things are in guest memory, and the ports.
//!
//! The program itself is in `sys.rs`. Below [`guest::RESERVED`] everything belongs to the page tables, the code and the
//! stacks; from there to 2 MiB lie the virtqueue and the words below; then come the huge pages.

use fpr_host_agent::kvm::guest;

/// Bytes of a huge page.
pub(crate) const HUGE_PAGE: u64 = 2 << 20;
/// Bytes of a page: the program writes and checks one word in each.
pub(crate) const PAGE: u64 = 4096;
/// First byte of huge page 0.
pub(crate) const FIRST: u64 = HUGE_PAGE;
/// Huge pages of the guest; at most 32, Linux' bound for one report.
pub(crate) const HUGE_PAGES: u64 = 24;

/// Entries of the queue; a power of two.
pub(crate) const QUEUE_SIZE: u16 = 64;
/// Descriptor table, available ring and used ring.
pub(crate) const BASE: u64 = guest::RESERVED;
pub(crate) const AVAIL: u64 = 0x1000;
pub(crate) const USED: u64 = 0x2000;

/// Words of 8 bytes, as offsets from [`BASE`].
///
/// Written by the host before the start: how many rounds, which huge pages each processor owns, whether the second
/// processor has filled its own (0 until it has) and what is reported in each round, from round 1 on.
pub(crate) const ROUNDS: u64 = 0x3000;
pub(crate) const OWNED: u64 = 0x3010;
pub(crate) const READY: u64 = 0x3020;
pub(crate) const REPORTED: u64 = 0x3100;
/// Most rounds.
pub(crate) const MAX_ROUNDS: u64 = 31;
/// Tells the second processor to check its pages once more and end. Set by the first, or by the host.
pub(crate) const STOP: u64 = 0x3028;
/// Written by the guest: how often the second processor has gone through its pages, and what each processor found
/// where: address, expected and found word, 32 bytes apart.
pub(crate) const SWEEPS: u64 = 0x3030;
pub(crate) const FOUND: u64 = 0x3040;
/// The generation of the pattern in each huge page.
pub(crate) const GENERATIONS: u64 = 0x3200;

/// The doorbell of the queue.
pub(crate) const DOORBELL: u16 = 0x10;
/// All checks passed.
pub(crate) const DONE: u16 = 0x11;
/// A word is not what it must be: see [`FOUND`].
pub(crate) const MISMATCH: u16 = 0x12;

/// The word in the page at `address`: the address, and above it the generation, which is never 0.
pub(crate) const fn pattern(address: u64, generation: u64) -> u64 {
    generation << 32 | address
}
