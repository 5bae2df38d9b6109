//! What the guest says of itself in `Hello`: boot id, kernel release, page size, huge page size.
//!
//! Read once at start.

use super::meminfo::MemInfoReader;
use super::text::read_value;
use super::{ReadError, Roots};
use fpr_protocol::HugePageSize;
use fpr_protocol::units::HugePageSizeError;
use nix::errno::Errno;
use nix::unistd::{SysconfVar, sysconf};
use std::path::PathBuf;

/// Largest huge page that is a sensible unit of a hint. Above it memory is hardly ever free as a whole: the PMD size of
/// arm64 with 64 KiB pages is 512 MiB. It is 2 MiB with 4 KiB pages and 32 MiB with 16 KiB pages.
const MAX_HUGE_PAGE_BYTES: u64 = 32 << 20;

/// Unit where the PMD size is too large: what Linux's own page reporting uses on arm64 with 64 KiB pages (order 5,
/// `drivers/virtio/virtio_balloon.c`), and a hugetlb size there.
const FALLBACK_BYTES: u64 = 2 << 20;

/// Why the huge page size is unknown.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// `sysconf(_SC_PAGESIZE)` failed.
    #[error("sysconf(_SC_PAGESIZE) gives no page size")]
    PageSize(#[source] Errno),
    /// Neither transparent nor persistent huge pages.
    #[error("this kernel knows no huge pages: {thp} and {hugetlb} are missing")]
    NoHugePages {
        /// Where the THP size would be.
        thp: PathBuf,
        /// Where the hugetlb size would be.
        hugetlb: String,
    },
    /// The kernel names a size that cannot be.
    #[error("a huge page of {bytes} bytes over base pages of {page_bytes} bytes cannot be used")]
    HugePageSize {
        /// The size the kernel names.
        bytes: u64,
        /// Base page size.
        page_bytes: u32,
        /// What is wrong with it.
        #[source]
        source: Option<HugePageSizeError>,
    },
}

/// `/proc/sys/kernel/random/boot_id`.
pub fn boot_id(roots: &Roots) -> Result<[u8; 16], ReadError> {
    let path = roots.proc.join("sys/kernel/random/boot_id");
    let wanted = "boot id";
    read_value(path.clone(), "a UUID", uuid)?.ok_or(ReadError::Missing { path, wanted })
}

/// `uname -r`, from `/proc/sys/kernel/osrelease`.
pub fn kernel_release(roots: &Roots) -> Result<String, ReadError> {
    let path = roots.proc.join("sys/kernel/osrelease");
    let release = |text: &str| (!text.is_empty() && !text.contains('/')).then(|| text.to_owned());
    read_value(path.clone(), "a kernel release", release)?.ok_or(ReadError::Missing { path, wanted: "kernel release" })
}

/// Base page size of this machine in bytes.
pub fn page_size() -> Result<u32, IdentityError> {
    let size = sysconf(SysconfVar::PAGE_SIZE).map_err(IdentityError::PageSize)?;
    size.and_then(|size| u32::try_from(size).ok()).ok_or(IdentityError::PageSize(Errno::EINVAL))
}

/// The unit of hints: the size of a transparent huge page, or of a default hugetlb page in a kernel without THP, or
/// 2 MiB where that is larger than 32 MiB.
pub fn huge_page_size(roots: &Roots, page_bytes: u32) -> Result<HugePageSize, IdentityError> {
    let thp = roots.sys.join("kernel/mm/transparent_hugepage/hpage_pmd_size");
    let bytes = match read_value(thp.clone(), "a number of bytes", |text| text.parse::<u64>().ok())? {
        Some(bytes) => bytes,
        None => match MemInfoReader::open(roots)?.read()?.huge_pages {
            Some(pool) => pool.page_bytes,
            None => {
                return Err(IdentityError::NoHugePages { thp, hugetlb: "Hugepagesize in /proc/meminfo".to_owned() });
            }
        },
    };
    let bytes = if bytes > MAX_HUGE_PAGE_BYTES { FALLBACK_BYTES } else { bytes };
    let error = |source| IdentityError::HugePageSize { bytes, page_bytes, source };
    let ratio =
        bytes.checked_div(page_bytes.into()).filter(|r| r.is_power_of_two() && r * u64::from(page_bytes) == bytes);
    let order = u8::try_from(ratio.ok_or_else(|| error(None))?.trailing_zeros()).map_err(|_| error(None))?;
    HugePageSize::new(page_bytes, order).map_err(|source| error(Some(source)))
}

fn uuid(text: &str) -> Option<[u8; 16]> {
    let well_formed = text.split('-').map(str::len).eq([8, 4, 4, 4, 12]);
    let digits: String = text.split('-').collect();
    (well_formed && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
        .then(|| u128::from_str_radix(&digits, 16).ok())
        .flatten()
        .map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::fake::Tree;
    use proptest::prelude::*;

    const THP: &str = "sys/kernel/mm/transparent_hugepage/hpage_pmd_size";
    const MEMINFO: &str = "MemTotal: 1 kB\nMemFree: 1 kB\nMemAvailable: 1 kB\nCached: 1 kB\n";

    #[test]
    fn boot_id_and_release() {
        let tree = Tree::new(&[
            ("proc/sys/kernel/random/boot_id", "00112233-4455-6677-8899-aabbccddeeff\n"),
            ("proc/sys/kernel/osrelease", "6.12.38+deb12-cloud-amd64\n"),
        ]);
        let expected = [0, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff];
        assert_eq!(boot_id(&tree.roots()).unwrap(), expected);
        assert_eq!(kernel_release(&tree.roots()).unwrap(), "6.12.38+deb12-cloud-amd64");
        tree.write("proc/sys/kernel/random/boot_id", b"00112233-4455-6677-8899-aabbccddeef\n");
        assert!(matches!(boot_id(&tree.roots()), Err(ReadError::Malformed { line: 1, .. })));
    }

    #[test]
    fn huge_page_sizes_of_real_machines() {
        for (page_bytes, pmd_bytes, order) in [(4096, 2 << 20, 9), (16384, 32 << 20, 11), (65536, 512 << 20, 5)] {
            let tree = Tree::new(&[(THP, &format!("{pmd_bytes}\n"))]);
            assert_eq!(huge_page_size(&tree.roots(), page_bytes).unwrap().order(), order);
        }
    }

    #[test]
    fn without_transparent_huge_pages() {
        let pool =
            "HugePages_Total: 0\nHugePages_Free: 0\nHugePages_Rsvd: 0\nHugePages_Surp: 0\nHugepagesize: 2048 kB\n";
        let tree = Tree::new(&[("proc/meminfo", &format!("{MEMINFO}{pool}"))]);
        assert_eq!(huge_page_size(&tree.roots(), 4096).unwrap().order(), 9);
        tree.write("proc/meminfo", MEMINFO.as_bytes());
        assert!(matches!(huge_page_size(&tree.roots(), 4096), Err(IdentityError::NoHugePages { .. })));
    }

    #[test]
    fn impossible_sizes() {
        for bytes in ["0", "4096", "6144", "3145728"] {
            let tree = Tree::new(&[(THP, bytes)]);
            let error = huge_page_size(&tree.roots(), 4096);
            assert!(matches!(error, Err(IdentityError::HugePageSize { .. })), "{bytes}");
        }
    }

    #[test]
    fn this_machine() {
        let roots = Roots::default();
        assert_ne!(boot_id(&roots).unwrap(), [0; 16]);
        assert!(!kernel_release(&roots).unwrap().is_empty());
        assert!(huge_page_size(&roots, page_size().unwrap()).is_ok());
    }

    proptest! {
        #[test]
        fn never_panics(text in "[0-9a-f-]{30,40}|\\PC*") {
            let _ = uuid(&text);
        }
    }
}
