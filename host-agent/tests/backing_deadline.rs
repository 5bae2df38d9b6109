//! The drop guard on real processes: each test runs itself again as the child that arms it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use fpr_host_agent::backing::{DropGuard, boot_time};
use nix::sys::signal::{Signal, kill, raise};
use nix::unistd::Pid;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// Set in the child, where the test's body is what the child does.
const CHILD: &str = "FPR_TEST_DEADLINE_CHILD";

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

fn start(test: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD, "1").spawn().unwrap()
}

/// Waits for the child's end and kills it when it takes longer than a minute.
fn wait(mut child: Child) -> ExitStatus {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > deadline {
            let _ = kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGCONT);
            child.kill().unwrap();
            panic!("the child still ran after a minute: {:?}", child.wait());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn arm(after: Duration) -> DropGuard {
    DropGuard::arm(boot_time().unwrap() + after).unwrap()
}

#[test]
fn a_stopped_process_is_killed_at_the_deadline() {
    if is_child() {
        let _guard = arm(Duration::from_millis(300));
        raise(Signal::SIGSTOP).unwrap();
        // Only if somebody continued it; then the parent sees this code and not SIGKILL.
        std::process::exit(3);
    }
    let started = Instant::now();
    let status = wait(start("a_stopped_process_is_killed_at_the_deadline"));
    assert_eq!(status.signal(), Some(libc::SIGKILL), "{status}");
    assert!(started.elapsed() >= Duration::from_millis(300), "killed before the deadline");
}

#[test]
fn a_busy_process_with_threads_is_killed_at_the_deadline() {
    if is_child() {
        let _guard = arm(Duration::from_millis(100));
        let busy = std::thread::spawn(|| {
            loop {
                std::hint::spin_loop();
            }
        });
        let _ = busy.join();
        std::process::exit(3);
    }
    let status = wait(start("a_busy_process_with_threads_is_killed_at_the_deadline"));
    assert_eq!(status.signal(), Some(libc::SIGKILL), "{status}");
}

#[test]
fn a_deadline_that_has_passed_kills_at_once() {
    if is_child() {
        let _guard = DropGuard::arm(Duration::ZERO).unwrap();
        std::thread::sleep(Duration::from_secs(120));
        std::process::exit(3);
    }
    let status = wait(start("a_deadline_that_has_passed_kills_at_once"));
    assert_eq!(status.signal(), Some(libc::SIGKILL), "{status}");
}

#[test]
fn a_disarmed_guard_does_not_kill() {
    if is_child() {
        let deadline = boot_time().unwrap() + Duration::from_millis(50);
        drop(DropGuard::arm(deadline).unwrap());
        while boot_time().unwrap() < deadline + Duration::from_millis(200) {
            std::thread::sleep(Duration::from_millis(10));
        }
        std::process::exit(7);
    }
    let status = wait(start("a_disarmed_guard_does_not_kill"));
    assert_eq!(status.code(), Some(7), "{status}");
}
