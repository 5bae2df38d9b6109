//! The agent against a model of kernel and host: by example, then in random order against the safety rule.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::held::BatchId;
use super::*;
use fpr_protocol::message::{Ack, FreedPages, Limits, Proven, Region, SurveyReply};
use fpr_protocol::{BackedRange, HugePageRange, HugePageSize, Isolation, Version, VersionRange};
use std::collections::BTreeSet;

mod demand;
mod late;

const HP: u64 = 2 << 20;
const BLOCK: u64 = 128 << 20;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn facts() -> Facts {
    Facts {
        hello: Hello {
            versions: VersionRange::SUPPORTED,
            agent_version: "1".into(),
            boot_id: [0; 16],
            page_size: 4096,
            huge_page_order: 9,
            memory_block_bytes: BLOCK,
            memory_total_bytes: 1 << 30,
            kernel_release: "6.12".into(),
            freed_pages: FreedPages::Untouched,
            confidential: false,
            now_ns: 0,
        },
        size: HugePageSize::new(4096, 9).unwrap(),
        block_bytes: Some(BLOCK),
        offline: Method::Usable,
        claims: Method::Usable,
        leftovers: false,
    }
}

fn welcome(nonce: u64) -> Message {
    Message::Welcome(Welcome {
        version: Version::CURRENT,
        session_nonce: nonce,
        limits: Limits { max_report_ranges: 512, max_huge_pages_in_flight: 2048, lease_ms: 2000, grace_ms: 3000 },
        gates: vec![],
        regions: vec![Region { start: GuestAddress(0), bytes: 1 << 30 }],
    })
}

/// A guest of eight blocks and its host, which answer at once.
struct World {
    agent: Agent,
    now: Duration,
    /// Free huge pages in the guest.
    free: BTreeSet<u64>,
    /// Backed huge pages on the host.
    backed: BTreeSet<u64>,
    offline: BTreeSet<u64>,
    /// Free pages at the tail of the free lists: onlining puts them there.
    tail: BTreeSet<u64>,
    batches: BTreeMap<BatchId, Vec<u64>>,
    free_bytes: u64,
    lowest_free: u64,
    sent: Vec<Message>,
    notes: Vec<Note>,
    /// Blocks that turn out to be in use.
    in_use: BTreeSet<u64>,
    /// Blocks that the kernel refuses, and how often it was asked for any.
    refused: BTreeSet<u64>,
    attempts: u32,
    answer: bool,
}

impl World {
    fn new(facts: Facts) -> Self {
        Self {
            agent: Agent::new(Policy::default(), facts),
            now: ms(1000),
            free: (64..512).collect(),
            backed: (0..512).collect(),
            offline: BTreeSet::new(),
            tail: BTreeSet::new(),
            batches: BTreeMap::new(),
            free_bytes: 900 << 20,
            lowest_free: u64::MAX,
            sent: Vec::new(),
            notes: Vec::new(),
            in_use: BTreeSet::new(),
            refused: BTreeSet::new(),
            attempts: 0,
            answer: true,
        }
    }

    fn take(&mut self, bytes: u64) {
        self.free_bytes = self.free_bytes.saturating_sub(bytes);
        self.lowest_free = self.lowest_free.min(self.free_bytes);
    }

    fn event(&mut self, event: Event) {
        let mut queue = std::collections::VecDeque::from([event]);
        while let Some(event) = queue.pop_front() {
            for action in self.agent.handle(event, self.now) {
                queue.extend(self.act(action));
            }
        }
    }

    fn act(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Send(message) => {
                self.sent.push(message.clone());
                return self.answer.then(|| self.host(message)).flatten().map(Event::Message);
            }
            Action::Look => return Some(Event::Looked(self.free.iter().map(|n| GuestAddress(n * HP)).collect())),
            Action::Offline(block) if self.in_use.contains(&block.0) => {
                return Some(Event::Offline(block, OfflineResult::InUse));
            }
            Action::Offline(block) if self.refused.contains(&block.0) => {
                self.attempts += 1;
                return Some(Event::Offline(block, OfflineResult::Refused));
            }
            Action::Offline(block) => {
                self.attempts += 1;
                assert!(self.offline.insert(block.0), "offline twice");
                self.take(BLOCK);
                for n in block.0 * 64..(block.0 + 1) * 64 {
                    assert!(self.free.remove(&n), "a page in use went offline");
                }
                return Some(Event::Offline(block, OfflineResult::Isolated));
            }
            Action::CheckBlock(block) => return Some(Event::BlockChecked(block, self.offline.contains(&block.0))),
            Action::Online(block) => {
                if !self.offline.remove(&block.0) {
                    return Some(Event::Online(block, OnlineResult::StolenOnline));
                }
                self.free_bytes += BLOCK;
                self.free.extend(block.0 * 64..(block.0 + 1) * 64);
                self.tail.extend(block.0 * 64..(block.0 + 1) * 64);
                return Some(Event::Online(block, OnlineResult::Online));
            }
            Action::Claim(batch, count) => {
                let (tail, head): (Vec<u64>, Vec<u64>) =
                    self.free.iter().rev().partition(|page| self.tail.contains(page));
                let pages: Vec<u64> = head.into_iter().chain(tail).take(count as usize).collect();
                let short = (pages.len() < count as usize).then_some(ClaimShort::Exhausted);
                for page in &pages {
                    self.free.remove(page);
                    self.backed.insert(*page);
                }
                self.take(pages.len() as u64 * HP);
                let mut pages = pages;
                pages.sort_unstable();
                self.batches.insert(batch, pages.clone());
                return Some(Event::Claimed(batch, pages.iter().map(|n| GuestAddress(n * HP)).collect(), short));
            }
            Action::Release(batch) => {
                let pages = self.batches.remove(&batch).expect("released twice");
                self.free_bytes += pages.len() as u64 * HP;
                self.free.extend(pages);
            }
            Action::WriteCookies(batch, cookies) => assert_eq!(cookies.len(), self.batches[&batch].len()),
            Action::Note(note) => self.notes.push(note),
            Action::Disconnect(_) => return Some(Event::LinkDown),
            Action::Recover => {}
        }
        None
    }

    fn host(&mut self, message: Message) -> Option<Message> {
        Some(match message {
            Message::Hello(_) => welcome(7),
            Message::Prove(prove) => {
                Message::Proven(Proven { sequence: prove.sequence, regions: vec![true], mismatches: 0 })
            }
            Message::Survey(survey) => {
                let mut backed = Vec::new();
                for range in survey.ranges {
                    for n in range.start.0 / HP..range.start.0 / HP + u64::from(range.count) {
                        if self.backed.contains(&n) {
                            let range = HugePageRange { start: GuestAddress(n * HP), count: 1 };
                            backed.push(BackedRange { range, backed_bytes: HP });
                        }
                    }
                }
                Message::SurveyReply(SurveyReply { sequence: survey.sequence, backed })
            }
            Message::Report(report) => {
                let mut results = Vec::new();
                for reported in report.ranges {
                    let first = reported.range.start.0 / HP;
                    for n in first..first + u64::from(reported.range.count) {
                        assert!(!self.free.contains(&n), "a page nobody holds was reported");
                        match reported.isolation {
                            Isolation::Offlined => assert!(self.offline.contains(&(n / 64))),
                            Isolation::Claimed => {
                                assert!(self.batches.values().any(|pages| pages.contains(&n)));
                            }
                        }
                        self.backed.remove(&n);
                    }
                    results.push(RangeResult::Dropped { bytes: u64::from(reported.range.count) * HP });
                }
                Message::Ack(Ack { sequence: report.sequence, results })
            }
            _ => return None,
        })
    }

    fn connect(&mut self) {
        self.event(Event::Watch { free_bytes: self.free_bytes, stalled: false });
        self.event(Event::LinkUp);
        if self.answer {
            self.event(Event::Message(Message::Ping { id: 1 }));
        }
    }

    /// Connects, answers the survey of the first pass and nothing after it, so that blocks stay reported.
    fn leave_reports_unanswered(&mut self) {
        self.agent.self_test = SelfTest::Passed;
        self.connect();
        while !self.sent.iter().any(|message| matches!(message, Message::Survey(_))) {
            self.wait(ms(50));
        }
        self.answer = false;
        self.wait(ms(400));
    }

    fn wait(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now = (self.now + ms(50)).min(until);
            self.event(Event::Watch { free_bytes: self.free_bytes, stalled: false });
        }
    }
}

#[test]
fn free_memory_goes_back_and_everything_held_returns() {
    let mut world = World::new(facts());
    world.connect();
    world.wait(ms(2000));
    assert_eq!(world.backed, (0..64).collect(), "only what is in use stays backed");
    assert_eq!(world.free, (64..512).collect());
    assert!(world.agent.is_clear());
    assert!(world.agent.totals().huge_pages_offlined >= 6 * 64, "{:?}", world.agent.totals());
}

#[test]
fn without_offlining_claims_do_it_down_to_the_floor() {
    let mut world = World::new(Facts { offline: Method::Off("test".into()), ..facts() });
    world.connect();
    world.wait(ms(3000));
    let left = world.backed.intersection(&world.free).count() as u64 * HP;
    assert!(left <= Policy::default().floor_bytes + 64 * HP, "{left:#x}");
    assert!(world.agent.is_clear());
    assert_eq!(world.agent.totals().huge_pages_offlined, 0);
}

#[test]
fn a_block_in_use_is_left_alone_and_its_free_pages_are_claimed() {
    let mut world = World::new(facts());
    world.in_use.insert(3);
    world.connect();
    world.wait(ms(3000));
    assert!(world.backed.range(192..256).count() <= 32, "{:?}", world.backed);
    assert!(world.agent.totals().huge_pages_claimed > 0);
}

#[test]
fn somebody_who_onlines_blocks_is_found_by_the_self_test() {
    let mut world = World::new(facts());
    world.connect();
    world.wait(ms(200));
    assert_eq!(world.offline.len(), 1, "one block until the test has passed");
    let stolen = world.offline.pop_first().unwrap();
    world.free.extend(stolen * 64..(stolen + 1) * 64);
    world.wait(ms(2000));
    assert!(world.notes.iter().any(|note| matches!(note, Note::MethodOff("offlining", _))), "{:?}", world.notes);
    assert!(world.agent.totals().huge_pages_claimed > 0, "claims go on");
}

#[test]
fn a_block_whose_state_cannot_be_read_is_brought_back() {
    let mut world = World::new(facts());
    world.connect();
    world.wait(ms(200));
    let block = BlockNumber(*world.offline.first().unwrap());
    world.event(Event::BlockChecked(block, false));
    assert!(world.offline.is_empty(), "left offline and forgotten");
    assert!(world.agent.is_clear());
}

#[test]
fn unanswered_memory_stays_isolated_until_lease_grace_and_margin_are_over() {
    let mut world = World::new(facts());
    world.leave_reports_unanswered();
    let held = world.offline.clone();
    assert!(!held.is_empty());
    world.wait(ms(2000 + 3000 + 5000 - 600));
    assert_eq!(world.offline, held, "still held");
    world.wait(ms(1000));
    assert!(world.offline.is_empty(), "taken back by time");
    assert!(world.notes.iter().any(|note| matches!(note, Note::Unanswered(_))));
}

#[test]
fn a_lost_link_keeps_reported_memory_and_the_fence_returns_it() {
    let mut world = World::new(facts());
    world.leave_reports_unanswered();
    let held = world.offline.clone();
    assert!(!held.is_empty());
    world.event(Event::LinkDown);
    world.wait(ms(1000));
    assert_eq!(world.offline, held, "a lost link proves nothing");
    world.event(Event::LinkUp);
    assert_eq!(world.offline, held, "nor does a new link");
    world.event(Event::Message(welcome(8)));
    assert!(world.offline.is_empty(), "the fence does");
}

#[test]
fn a_lost_link_does_not_make_unanswered_memory_wait_longer() {
    let mut world = World::new(facts());
    world.leave_reports_unanswered();
    assert!(!world.offline.is_empty());
    world.event(Event::LinkDown);
    world.wait(ms(2000 + 3000 + 5000));
    assert!(world.offline.is_empty(), "the limits of the session it was reported in count");
}

#[test]
fn leftovers_wait_for_the_fence_or_for_the_longest_lease() {
    let mut agent = Agent::new(Policy::default(), Facts { leftovers: true, ..facts() });
    agent.handle(Event::Tick, ms(0));
    assert_eq!(agent.handle(Event::Tick, ms(34_999)), []);
    assert_eq!(agent.handle(Event::Tick, ms(35_000)), [Action::Recover]);

    let mut agent = Agent::new(Policy::default(), Facts { leftovers: true, ..facts() });
    assert!(!agent.handle(Event::LinkUp, ms(0)).contains(&Action::Recover));
    assert!(agent.handle(Event::Message(welcome(1)), ms(1)).contains(&Action::Recover));
    assert!(!agent.handle(Event::Tick, ms(99_000)).contains(&Action::Recover), "once");
}

#[test]
fn demand_ends_a_pass_and_gives_back_at_once() {
    let mut world = World::new(Facts { offline: Method::Off("test".into()), ..facts() });
    world.connect();
    world.answer = true;
    while world.batches.is_empty() || world.agent.totals().huge_pages_dropped == 0 {
        world.now += ms(10);
        world.event(Event::Watch { free_bytes: world.free_bytes, stalled: false });
        if world.now > ms(20_000) {
            break;
        }
    }
    world.event(Event::Watch { free_bytes: 10 << 20, stalled: false });
    assert!(world.batches.is_empty(), "{:?}", world.batches.keys());
}

#[test]
fn what_is_answered_after_its_pass_was_called_off_comes_back() {
    let mut world = World::new(Facts { offline: Method::Off("test".into()), ..facts() });
    world.connect();
    while !world.sent.iter().any(|message| matches!(message, Message::Survey(_))) {
        world.wait(ms(50));
    }
    world.answer = false;
    world.wait(ms(400));
    world.event(Event::Watch { free_bytes: 10 << 20, stalled: false });
    assert!(!world.batches.is_empty(), "the host may be dropping");
    let reports: Vec<Message> = world.sent.iter().filter(|sent| matches!(sent, Message::Report(_))).cloned().collect();
    for report in reports {
        let ack = world.host(report).unwrap();
        world.event(Event::Message(ack));
    }
    assert!(world.batches.is_empty(), "held although nobody needs it: {:?}", world.batches.keys());
    assert!(!world.agent.is_busy());
}

#[test]
fn blocks_on_their_way_out_count_against_the_floor() {
    let mut world = World::new(facts());
    world.agent.self_test = SelfTest::Passed;
    let floor = Policy::default().floor_bytes;
    world.free_bytes = floor + 2 * BLOCK - 1;
    world.connect();
    world.wait(ms(3000));
    assert!(world.agent.totals().huge_pages_offlined > 0);
    assert!(world.lowest_free >= floor, "{} MiB left", world.lowest_free >> 20);
}

/// A deadline that has passed and stays would make the main loop spin.
#[test]
fn no_deadline_stays_in_the_past() {
    fn assert_waits(world: &mut World) {
        world.event(Event::Tick);
        let deadline = world.agent.next_deadline();
        assert!(deadline.is_none_or(|at| at > world.now), "{deadline:?} at {:?}", world.now);
    }
    // The address check finds no page to claim; then the host goes away, or closes a gate.
    let mut world = World::new(facts());
    world.free.clear();
    world.connect();
    world.event(Event::Message(Message::Inhibit(vec![Gate::Operator])));
    world.now += ms(20_000);
    assert_waits(&mut world);
    world.event(Event::LinkDown);
    assert_waits(&mut world);

    // The next session's address check takes its time while a pass is overdue.
    let mut world = World::new(facts());
    world.connect();
    world.wait(ms(3000));
    world.event(Event::LinkDown);
    world.now += ms(400_000);
    world.answer = false;
    world.event(Event::LinkUp);
    world.sent.clear();
    world.event(Event::Message(welcome(8)));
    world.event(Event::Message(Message::Ping { id: 2 }));
    assert!(world.sent.iter().any(|message| matches!(message, Message::Prove(_))));
    assert_waits(&mut world);
}

#[test]
fn a_closed_gate_stops_isolating_and_an_open_one_resumes() {
    let mut world = World::new(facts());
    world.connect();
    world.event(Event::Message(Message::Inhibit(vec![Gate::Operator])));
    world.wait(ms(3000));
    assert_eq!(world.backed.len(), 512);
    assert!(world.agent.is_clear());
    world.event(Event::Message(Message::Resume));
    world.wait(ms(3000));
    assert_eq!(world.backed, (0..64).collect());
}

#[test]
fn a_block_that_the_kernel_refused_lets_offlining_rest() {
    let mut world = World::new(facts());
    world.refused.extend(0..8);
    world.connect();
    world.wait(ms(3000));
    assert_eq!(world.attempts, 1, "one page dump, not eight");
    assert!(world.agent.totals().huge_pages_dropped > 0, "claims go on");
    world.refused.clear();
    world.agent.pace.ask();
    world.wait(ms(12_000));
    world.agent.pace.ask();
    world.wait(ms(3000));
    assert!(world.attempts > 1, "it is tried again");
}

#[test]
fn a_silent_host_is_left() {
    let mut agent = Agent::new(Policy::default(), facts());
    agent.handle(Event::LinkUp, ms(0));
    let at = agent.next_deadline().unwrap();
    assert!(agent.handle(Event::Tick, at).contains(&Action::Disconnect(CloseReason::HelloTimeout)));
}

#[test]
fn nothing_is_reported_from_a_region_that_was_not_proven() {
    let mut world = World::new(Facts { claims: Method::Off("no hugetlbfs".into()), ..facts() });
    world.connect();
    world.wait(ms(3000));
    assert!(!world.sent.iter().any(|message| matches!(message, Message::Report(_))));
}
