//! Passes that were asked for, and passes beside a kernel that reports by itself.

use super::*;
use fpr_protocol::PassEnd;

fn reclaimed(world: &World) -> Vec<(u64, PassEnd)> {
    let ends = world.sent.iter().filter_map(|message| match message {
        Message::Reclaimed { id, end } => Some((*id, *end)),
        _ => None,
    });
    ends.collect()
}

fn reclaim(world: &mut World, id: u64) {
    world.event(Event::Message(Message::Reclaim { id }));
}

/// A guest whose kernel reports, after what the agent did at the start: nothing is backed but what is in use.
fn beside_a_kernel() -> World {
    let mut world = World::new(facts());
    world.connect();
    world.event(Event::Message(Message::KernelReporting { active: true }));
    world.wait(ms(3000));
    world.backed = (0..64).collect();
    world
}

/// A workload uses huge pages and frees them again, so that they are backed.
fn use_and_free(world: &mut World, pages: impl Iterator<Item = u64> + Clone) {
    let bytes = pages.clone().count() as u64 * HP;
    world.free_bytes -= bytes;
    world.wait(ms(100));
    // Freed pages come to the head of the free lists.
    for page in pages.clone() {
        world.tail.remove(&page);
    }
    world.backed.extend(pages);
    world.free_bytes += bytes;
    world.wait(ms(15_000));
}

#[test]
fn beside_a_kernel_only_big_frees_are_worth_a_pass() {
    let mut world = beside_a_kernel();
    let before = (world.agent.totals(), world.backed.clone());
    // 126 MiB of the guest's 1 GiB; a big free is an eighth of it.
    use_and_free(&mut world, 128..191);
    assert_eq!(world.agent.totals(), before.0, "a small free is the kernel's");
    assert_eq!(world.backed.len(), 64 + 63);

    use_and_free(&mut world, 128..256);
    assert_eq!(world.backed, before.1, "two wholly free blocks went offline");
    let totals = world.agent.totals();
    assert_eq!(totals.huge_pages_offlined - before.0.huge_pages_offlined, 128);
    assert_eq!(totals.huge_pages_claimed, before.0.huge_pages_claimed, "nothing is claimed unasked");
}

#[test]
fn a_big_free_without_whole_blocks_is_left_to_the_kernel() {
    let mut world = beside_a_kernel();
    let before = world.agent.totals();
    // 384 MiB, but a page in use in each block.
    world.free = world.free.iter().copied().filter(|page| page % 64 != 5).collect();
    use_and_free(&mut world, (128..320).filter(|page| page % 64 != 5));
    let totals = world.agent.totals();
    assert_eq!(
        (totals.huge_pages_offlined, totals.huge_pages_claimed),
        (before.huge_pages_offlined, before.huge_pages_claimed)
    );
    assert!(totals.passes > before.passes, "it was looked at");

    reclaim(&mut world, 1);
    world.wait(ms(3000));
    assert_eq!(reclaimed(&world), [(1, PassEnd::GaveBack)]);
    assert!(world.agent.totals().huge_pages_claimed > before.huge_pages_claimed, "on demand claims do it");
}

#[test]
fn time_alone_starts_no_pass_beside_a_kernel_and_does_again_without() {
    let mut world = beside_a_kernel();
    let passes = world.agent.totals().passes;
    world.wait(ms(400_000));
    assert_eq!(world.agent.totals().passes, passes);
    world.event(Event::Message(Message::KernelReporting { active: false }));
    world.wait(ms(400_000));
    assert!(world.agent.totals().passes > passes);
}

#[test]
fn a_reclaim_does_not_wait_for_age_and_is_answered_after_its_reports() {
    let mut world = World::new(facts());
    world.connect();
    world.wait(ms(3000));
    world.event(Event::Message(Message::Refaults { dropped_bytes: 100, returned_bytes: 100 }));
    for _ in 0..10 {
        world.event(Event::Message(Message::Refaults { dropped_bytes: 100, returned_bytes: 100 }));
    }
    assert_eq!(world.agent.age.current(), ms(30_000));
    world.backed.extend(128..192);
    let at = world.sent.len();
    reclaim(&mut world, 9);
    // Not a millisecond later.
    assert_eq!(reclaimed(&world), [(9, PassEnd::GaveBack)]);
    assert_eq!(world.backed, (0..64).collect());
    let order: Vec<&str> = world.sent[at..].iter().map(Message::name).collect();
    assert_eq!((order.first(), order.last()), (Some(&"Survey"), Some(&"Reclaimed")), "{order:?}");
    assert!(world.agent.is_clear());
    reclaim(&mut world, 10);
    assert_eq!(reclaimed(&world)[1], (10, PassEnd::FoundNothing));
}

#[test]
fn a_reclaim_during_a_pass_gets_a_pass_of_its_own() {
    let mut world = World::new(facts());
    world.leave_reports_unanswered();
    assert!(world.agent.pass.is_some());
    reclaim(&mut world, 1);
    reclaim(&mut world, 2);
    assert_eq!(reclaimed(&world), []);
    world.answer = true;
    let reports: Vec<Message> =
        world.sent.iter().filter(|message| matches!(message, Message::Report(_))).cloned().collect();
    for report in reports {
        let ack = world.host(report).unwrap();
        world.event(Event::Message(ack));
    }
    assert_eq!(reclaimed(&world).iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 2]);
    assert!(world.agent.is_clear());
}

#[test]
fn a_reclaim_keeps_the_floor_and_ends_when_the_workload_needs_memory() {
    let mut world = World::new(Facts { offline: Method::Off("test".into()), ..facts() });
    world.free_bytes = 300 << 20;
    world.connect();
    world.wait(ms(3000));
    world.backed = (0..512).collect();
    world.lowest_free = u64::MAX;
    reclaim(&mut world, 1);
    assert!(world.lowest_free >= Policy::default().floor_bytes, "{:#x}", world.lowest_free);
    assert_eq!(reclaimed(&world), [(1, PassEnd::GaveBack)]);

    world.backed = (0..512).collect();
    world.answer = false;
    reclaim(&mut world, 2);
    world.event(Event::Watch { free_bytes: world.free_bytes, stalled: true });
    assert_eq!(reclaimed(&world)[1], (2, PassEnd::CutShort));
}

#[test]
fn a_reclaim_that_no_pass_can_serve_is_answered_at_once() {
    let mut world = World::new(facts());
    world.connect();
    world.wait(ms(3000));
    world.event(Event::Message(Message::Inhibit(vec![Gate::Operator])));
    reclaim(&mut world, 1);
    assert_eq!(reclaimed(&world), [(1, PassEnd::CannotIsolate)]);
    world.event(Event::Message(Message::Resume));
    world.answer = false;
    for id in 2..100 {
        reclaim(&mut world, id);
    }
    assert!(reclaimed(&world).len() > 1, "no more than a few wait");
    world.event(Event::LinkDown);
    let answered = reclaimed(&world).len();
    world.answer = true;
    world.connect();
    world.wait(ms(20_000));
    assert_eq!(reclaimed(&world).len(), answered, "the next session knows nothing of them");
}

#[test]
fn what_a_kernel_reported_in_vain_is_returned_when_the_gates_open() {
    let mut world = beside_a_kernel();
    let before = world.backed.len();
    world.event(Event::Message(Message::Inhibit(vec![fpr_protocol::Gate::Operator])));
    use_and_free(&mut world, 128..160);
    assert_eq!(world.backed.len(), before + 32, "refused, and reported no more");
    world.event(Event::Message(Message::Resume));
    world.wait(ms(5000));
    assert_eq!(world.backed.len(), before);
}
