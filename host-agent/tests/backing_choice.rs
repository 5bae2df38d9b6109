//! Which memory files are refused, and that the message says what to change. Tier 2: real files.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use fpr_host_agent::backing::{GuestBacking, MemoryMap, ReadError, Region, Unsuitable, choose};
use fpr_protocol::{GuestAddress, HugePageSize, Refusal};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::sync::Arc;

const HUGE: u64 = 2 << 20;

fn memfd(bytes: u64) -> Arc<File> {
    let file = File::from(memfd_create(c"guest-memory", MFdFlags::MFD_ALLOW_SEALING).unwrap());
    file.set_len(bytes).unwrap();
    Arc::new(file)
}

fn refusal(file: File) -> Unsuitable {
    choose(&Arc::new(file)).err().expect("must be refused")
}

fn reopen(file: &File, options: &std::fs::OpenOptions) -> File {
    use std::os::fd::AsRawFd;
    options.open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap()
}

#[test]
fn a_read_only_descriptor_is_refused() {
    let error = refusal(reopen(&memfd(HUGE), File::options().read(true)));
    assert!(matches!(error, Unsuitable::ReadOnly));
    assert!(error.to_string().contains("readonly=off"), "{error}");
}

#[test]
fn a_descriptor_that_cannot_be_read_is_refused() {
    // Cookies could not be checked.
    assert!(matches!(refusal(reopen(&memfd(HUGE), File::options().write(true))), Unsuitable::ReadOnly));
}

#[test]
fn a_write_seal_is_refused_and_the_seals_of_qemu_are_not() {
    let file = memfd(HUGE);
    let qemu = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK;
    fcntl(file.as_ref(), FcntlArg::F_ADD_SEALS(qemu)).unwrap();
    choose(&file).unwrap().punch(0..HUGE).unwrap();
    for seal in [SealFlag::F_SEAL_WRITE, SealFlag::F_SEAL_FUTURE_WRITE] {
        let file = memfd(HUGE);
        let backing = choose(&file).unwrap();
        fcntl(file.as_ref(), FcntlArg::F_ADD_SEALS(seal)).unwrap();
        let error = choose(&file).err().expect("must be refused");
        assert!(matches!(error, Unsuitable::Sealed { .. }), "{error}");
        assert!(backing.punch(0..HUGE).is_err(), "{seal:?} does forbid punching");
    }
}

#[test]
fn a_file_that_is_not_memory_is_refused() {
    let proc = refusal(File::options().read(true).write(true).open("/proc/self/oom_score_adj").unwrap());
    assert!(matches!(proc, Unsuitable::NotInMemory { magic: 0x9fa0 }), "{proc}");
    assert!(proc.to_string().contains("memory-backend-memfd,share=on"), "{proc}");
}

fn guest(regions: &[(u64, u64, u64, &Arc<File>)]) -> Result<GuestBacking, Unsuitable> {
    let region = |&(start, bytes, file_offset, file): &(u64, u64, u64, &Arc<File>)| Region {
        guest_address: GuestAddress(start),
        bytes,
        file: Arc::clone(file),
        file_offset,
    };
    GuestBacking::new(MemoryMap::new(regions.iter().map(region).collect()).unwrap())
}

#[test]
fn regions_that_share_a_file_are_counted_once() {
    let file = memfd(4 * HUGE);
    // As a second descriptor of the same file, as vhost-user passes one per region.
    let again = Arc::new(file.try_clone().unwrap());
    let other = memfd(HUGE);
    let guest = guest(&[(0, 0xa0000, 0, &file), (0xc0000, HUGE, 0xc0000, &again), (1 << 30, HUGE, 0, &other)]).unwrap();
    assert_eq!(guest.file_ids().count(), 2);
    std::os::unix::fs::FileExt::write_all_at(file.as_ref(), &[1; 8192], 0xc1000).unwrap();
    std::os::unix::fs::FileExt::write_all_at(other.as_ref(), &[2; 4096], 0).unwrap();
    assert_eq!(guest.allocated_bytes().unwrap(), 12288);
    let mut byte = [0];
    guest.read_at(GuestAddress(0xc1000), &mut byte).unwrap();
    assert_eq!(byte, [1]);
    guest.read_at(GuestAddress(1 << 30), &mut byte).unwrap();
    assert_eq!(byte, [2]);
    assert!(matches!(guest.read_at(GuestAddress(0xb0000), &mut byte), Err(ReadError::Refused(Refusal::OutsideMemory))));
}

#[test]
fn regions_that_alias_or_leave_their_file_are_refused() {
    let file = memfd(2 * HUGE);
    let again = Arc::new(file.try_clone().unwrap());
    let aliased = guest(&[(0, HUGE, 4096, &file), (1 << 30, HUGE, 0, &again)]).err().unwrap();
    assert!(matches!(aliased, Unsuitable::Aliased { .. }), "{aliased}");
    let past_end = guest(&[(0, HUGE, HUGE + 4096, &file)]).err().unwrap();
    assert!(matches!(past_end, Unsuitable::PastEnd { file_bytes, .. } if file_bytes == 2 * HUGE), "{past_end}");
}

#[test]
fn pages_larger_than_the_guests_huge_pages_are_refused() {
    let size = |order| HugePageSize::new(4096, order).unwrap();
    guest(&[(0, HUGE, 0, &memfd(HUGE))]).unwrap().check_huge_page_size(size(1)).unwrap();
    // An empty file of hugetlbfs needs no huge page.
    let Ok(file) = memfd_create(c"guest-memory", MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB) else {
        panic!("memfd_create knows no 2 MiB hugetlb pages");
    };
    let file = Arc::new(File::from(file));
    file.set_len(HUGE).unwrap();
    let guest = guest(&[(0, HUGE, 0, &file)]).unwrap();
    guest.check_huge_page_size(size(9)).unwrap();
    let error = guest.check_huge_page_size(size(8)).unwrap_err();
    assert!(error.to_string().contains("hugetlbsize"), "{error}");
}
