//! Which virtqueue is what, from the features the driver negotiated.
//!
//! There are two numberings. virtio 1.2 (section 5.5.2) fixes the numbers: 0 inflateq, 1 deflateq, 2 statsq, 3
//! free_page_vq, 4 reporting_vq, and a queue whose feature is not negotiated does not exist. Linux passes queues that do
//! not exist as gaps (`init_vqs`, drivers/virtio/virtio_balloon.c), and its transports number what is left densely
//! (`queue_idx++`, drivers/virtio/virtio_pci_common.c); QEMU, crosvm and Cloud Hypervisor number like Linux. Patches of
//! 2024 that made Linux try the fixed numbers first and fall back to the dense ones were not merged, but a driver
//! could do so.
//!
//! Both are served, because with the features offered here no number means two different queues: number 2 is statsq
//! under both when it exists, and free_page_vq, which alone could take number 3 away from the reporting queue, is not
//! offered.

/// Vrings of the device: the numbers of the specification go up to 4.
pub(super) const QUEUES: usize = 5;

/// VIRTIO_BALLOON_F_STATS_VQ (virtio 1.2, section 5.5.3).
pub(super) const STATS_VQ: u64 = 1 << 1;

/// VIRTIO_BALLOON_F_PAGE_POISON.
pub(super) const PAGE_POISON: u64 = 1 << 4;

/// VIRTIO_BALLOON_F_PAGE_REPORTING; Linux calls it VIRTIO_BALLOON_F_REPORTING.
pub(super) const REPORTING: u64 = 1 << 5;

/// What a virtqueue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Page numbers that the guest's balloon holds from now on.
    Inflate,
    /// Page numbers that it takes back.
    Deflate,
    /// A buffer of statistics.
    Stats,
    /// Free memory, as writable buffers.
    Reporting,
}

/// The role of virtqueue `queue` under the negotiated `features`; `None` if no driver has a reason to use it.
pub(super) fn role(queue: usize, features: u64) -> Option<Role> {
    let stats = features & STATS_VQ != 0;
    let reporting = features & REPORTING != 0;
    match queue {
        0 => Some(Role::Inflate),
        1 => Some(Role::Deflate),
        2 if stats => Some(Role::Stats),
        2 if reporting => Some(Role::Reporting),
        3 if stats && reporting => Some(Role::Reporting),
        4 if reporting => Some(Role::Reporting),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::Role::{Deflate, Inflate, Reporting, Stats};
    use super::*;

    #[test]
    fn every_queue_under_every_set_of_features() {
        let table: [(u64, [Option<Role>; QUEUES]); 4] = [
            (0, [Some(Inflate), Some(Deflate), None, None, None]),
            (STATS_VQ, [Some(Inflate), Some(Deflate), Some(Stats), None, None]),
            (REPORTING, [Some(Inflate), Some(Deflate), Some(Reporting), None, Some(Reporting)]),
            (STATS_VQ | REPORTING, [Some(Inflate), Some(Deflate), Some(Stats), Some(Reporting), Some(Reporting)]),
        ];
        for (features, expected) in table {
            for others in [0, PAGE_POISON, 1 << 32] {
                let roles: [_; QUEUES] = std::array::from_fn(|queue| role(queue, features | others));
                assert_eq!(roles, expected, "features {features:#x}");
            }
            assert_eq!(role(QUEUES, features), None);
        }
    }

    /// The two numberings as their authors state them, so that serving one never breaks the other.
    #[test]
    fn linux_and_the_specification_both_find_their_queues() {
        let optional = [(STATS_VQ, 2, Stats), (REPORTING, 4, Reporting)];
        for features in [0, STATS_VQ, REPORTING, STATS_VQ | REPORTING] {
            let existing = optional.iter().filter(|(feature, ..)| features & feature != 0);
            for (dense, (_, fixed, expected)) in existing.enumerate() {
                assert_eq!(role(*fixed, features), Some(*expected), "specification, {features:#x}");
                assert_eq!(role(2 + dense, features), Some(*expected), "Linux, {features:#x}");
            }
        }
    }
}
