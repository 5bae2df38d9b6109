//! The configuration space over the wire.

use fpr_host_agent::device::balloon::Fault;

use super::Rig;
use super::mock_guest::balloon::{PAGE_POISON, REPORTING};

#[test]
fn writes_of_any_offset_and_size_are_taken_or_counted_and_the_device_goes_on() {
    let mut rig = Rig::new(REPORTING | PAGE_POISON);
    let unknown = [0xff; 4];
    assert_eq!(rig.guest.read_config(0, 16), [[0; 4], [0; 4], [0; 4], unknown].concat());
    // QEMU passes the whole space on, whatever the driver wrote.
    let mut whole = rig.guest.read_config(0, 16);
    whole[12..].copy_from_slice(&[0; 4]);
    rig.guest.write_config(0, &whole).unwrap();
    assert_eq!(rig.guest.read_config(12, 4), [0; 4]);
    // Byte by byte, and across two words of which the driver may write one.
    rig.guest.write_config(13, &[1]).unwrap();
    rig.guest.write_config(6, &[2, 3, 0, 0]).unwrap();
    assert_eq!(rig.guest.read_config(4, 12), [0, 0, 2, 3, 0, 0, 0, 0, 0, 1, 0, 0]);
    let refused = |rig: &Rig, fault| rig.owner.device.counters().refused(fault);
    assert_eq!(refused(&rig, Fault::ConfigReadOnly) + refused(&rig, Fault::ConfigOutOfRange), 0);

    for (count, (offset, size)) in [(0, 1), (0, 4), (8, 4), (3, 1), (9, 3)].into_iter().enumerate() {
        rig.guest.write_config(offset, &vec![9; size]).unwrap();
        assert_eq!(refused(&rig, Fault::ConfigReadOnly), count as u64 + 1, "{offset} {size}");
    }
    for (count, (offset, size)) in [(16, 1), (15, 2), (255, 1), (0, 256), (13, 200)].into_iter().enumerate() {
        rig.guest.write_config(offset, &vec![9; size]).unwrap();
        assert_eq!(refused(&rig, Fault::ConfigOutOfRange), count as u64 + 1, "{offset} {size}");
    }
    assert_eq!(rig.guest.read_config(0, 4), [0; 4]);
    assert_eq!(rig.guest.read_config(8, 4), [0; 4]);
}
