//! One VM without a guest: the front end of both devices, the drivers of their queues, an agent with a session.
//!
//! `cargo xtask bench scale` starts one process per VM, as a host has one VMM per VM: the daemon looks into the process of
//! each front end, and the price of that look depends on what the process holds. Commands come on stdin, one per line,
//! and each has one line as its answer:
//!
//! | command | does |
//! | --- | --- |
//! | `report COUNT START_NS PERIOD_NS` | COUNT times, at its time (CLOCK_MONOTONIC): a huge page of the agent, then one of the kernel; answers with `AGENT_NS KERNEL_NS` for each |
//! | `stall` | asks the host for answers and takes none of them |
//! | `flood MILLISECONDS` | kernel reports and stray packets, as fast as they are taken |
//! | `burn MILLISECONDS` | as much CPU time, and nothing for the daemon to do |

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation, unreachable_pub)]
#![allow(dead_code)] // Of what the tests share, this uses a part.

#[path = "../tests/mock_guest/mod.rs"]
mod mock_guest;

use std::io::{BufRead, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fpr_protocol::Message;
use fpr_protocol::message::{RangeResult, Stats, Survey};
use mock_guest::agent::{Agent, Session, claimed, hello, now_ns, range};
use mock_guest::balloon::{Balloon, REPORTING};
use mock_guest::queue::Queue;
use mock_guest::{HIGH, UPPER, UPPER_OFFSET};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

const HUGE: u64 = 2 << 20;
/// With the features this driver wants, the reporting queue is the third.
const INFLATE: usize = 0;
const REPORTS: usize = 2;
/// As real agents do.
const STATS: Duration = Duration::from_secs(10);
/// How much of a huge page is backed before it is reported: a drop of all of it would measure the kernel.
const TOUCHED: usize = 64 << 10;

struct Vm {
    agent: Agent,
    session: Session,
    balloon: Balloon,
    next_stats: Instant,
}

impl Vm {
    fn boot(vsock: &std::path::Path, balloon: &std::path::Path) -> Self {
        let mut agent = Agent::boot(vsock);
        let session = agent.start_session(hello());
        let mut balloon = Balloon::connect(balloon, agent.guest.file.try_clone().unwrap(), REPORTING);
        // Beside the rings of the other device.
        balloon.queues = (0..5).map(|queue| Queue::new(HIGH + 0x20_0000 + queue * 0x1_0000, 64)).collect();
        balloon.start(&[INFLATE, REPORTS]);
        Self { agent, session, balloon, next_stats: Instant::now() }
    }

    /// What an agent does when it has nothing to do.
    fn idle(&mut self) {
        self.agent.serve_waiting();
        if Instant::now() >= self.next_stats {
            self.next_stats = Instant::now() + STATS;
            self.agent.send(self.session.port, &Message::Stats(Stats::default()));
        }
    }

    fn touch(&self) {
        for page in [0, 1] {
            self.agent.guest.file.write_all_at(&vec![0xaa; TOUCHED], UPPER_OFFSET + page * HUGE).unwrap();
        }
    }

    fn report(&mut self, count: u64, start_ns: u64, period_ns: u64) -> Vec<(u64, u64)> {
        let mut times = Vec::new();
        for number in 0..count {
            self.touch();
            let sequence = self.session.next_sequence();
            self.agent.write_cookie(&self.session, sequence, 0, UPPER);
            let at = start_ns + number * period_ns;
            while now_ns() < at {
                self.idle();
                std::thread::sleep(Duration::from_nanos(at.saturating_sub(now_ns()).min(50_000_000)));
            }
            let begin = now_ns();
            let results = self.agent.report_as(&self.session, sequence, begin, vec![claimed(UPPER, 1)]);
            let answered = now_ns();
            assert!(matches!(results[..], [RangeResult::Dropped { .. }]), "{results:?}");
            let asked = now_ns();
            self.balloon.report(REPORTS, &[(UPPER + HUGE, HUGE as u32)]);
            self.balloon.wait_returned(REPORTS);
            times.push((answered - begin, now_ns() - asked));
        }
        times
    }

    /// Asks for more than it has room to receive.
    fn stall(&mut self) {
        for _ in 0..mock_guest::ENTRIES {
            let sequence = self.session.next_sequence();
            let ranges = vec![range(UPPER, 8)];
            self.agent.send(self.session.port, &Message::Survey(Survey { sequence, ranges }));
        }
        self.touch();
        self.balloon.report(REPORTS, &[(UPPER + HUGE, HUGE as u32)]);
    }

    fn flood(&mut self, limit: Duration) -> u64 {
        let (end, mut reports) = (Instant::now() + limit, 0);
        while Instant::now() < end {
            self.balloon.report(REPORTS, &[(UPPER + HUGE, HUGE as u32)]);
            (0..8).for_each(|_| self.agent.send_stray_packet());
            self.balloon.wait_returned(REPORTS);
            self.agent.serve_waiting();
            reports += 1;
        }
        reports
    }
}

fn main() {
    let mut sockets = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(vsock), Some(balloon)) = (sockets.next(), sockets.next()) else { panic!("mock_vm VSOCK BALLOON") };
    let mut vm = Vm::boot(&vsock, &balloon);
    let stdin = std::io::stdin();
    let answer = |text: &str| {
        let mut stdout = std::io::stdout();
        writeln!(stdout, "{text}").and_then(|()| stdout.flush()).unwrap();
    };
    answer("ready");
    loop {
        let mut waiting = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
        if poll(&mut waiting, PollTimeout::from(1000_u16)).unwrap() == 0 {
            vm.idle();
            continue;
        }
        let mut line = String::new();
        if stdin.lock().read_line(&mut line).unwrap() == 0 {
            return;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |index: usize| words[index].parse::<u64>().unwrap();
        match words[0] {
            "report" => {
                let times = vm.report(number(1), number(2), number(3));
                let times: Vec<String> = times.iter().map(|(agent, kernel)| format!("{agent} {kernel}")).collect();
                answer(&times.join(" "));
            }
            "stall" => {
                vm.stall();
                answer("stalled");
            }
            "flood" => {
                let reports = vm.flood(Duration::from_millis(number(1)));
                answer(&format!("flooded {reports}"));
            }
            "burn" => {
                let end = Instant::now() + Duration::from_millis(number(1));
                while Instant::now() < end {
                    std::hint::spin_loop();
                }
                answer("burnt");
            }
            other => panic!("{other}: no such command"),
        }
    }
}
