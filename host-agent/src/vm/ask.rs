//! One question to many VMs at once.

use super::{NotTaken, Request, VmHandle};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

/// How long a VM's task may take to answer. It blocks on nothing, so a healthy one needs microseconds; the control
/// socket's clients wait five times as long.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// Why a VM did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// It has ended, or never was.
    Gone,
    /// It is there and silent.
    Silent,
}

/// Asks them all, then waits: the time limit is for all of them together, however many are silent. Answers come in the
/// order of `vms`, each with what was given for it.
pub async fn ask_all<V, T>(
    vms: impl IntoIterator<Item = (V, Option<VmHandle>)>,
    limit: Duration,
    request: impl Fn(oneshot::Sender<T>) -> Request,
) -> Vec<(V, Result<T, Unanswered>)> {
    let deadline = Instant::now() + limit;
    let asked: Vec<_> = vms
        .into_iter()
        .map(|(vm, handle)| (vm, handle.map_or(Err(NotTaken::Ended), |handle| handle.request(&request))))
        .collect();
    let mut answers = Vec::with_capacity(asked.len());
    for (vm, receiver) in asked {
        let answer = match receiver {
            Ok(receiver) => match timeout_at(deadline, receiver).await {
                Ok(Ok(answer)) => Ok(answer),
                Ok(Err(_)) => Err(Unanswered::Gone),
                Err(_) => Err(Unanswered::Silent),
            },
            Err(NotTaken::Full) => Err(Unanswered::Silent),
            Err(NotTaken::Ended) => Err(Unanswered::Gone),
        };
        answers.push((vm, answer));
    }
    answers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_vm_that_does_not_answer_delays_nobody_and_is_named() {
        let (hung, _queue) = VmHandle::detached("hung");
        let (full, _full_queue) = VmHandle::detached("full");
        let _waiting: Vec<_> = std::iter::from_fn(|| full.request(Request::Ping).ok()).collect();
        let (gone, queue) = VmHandle::detached("gone");
        drop(queue);
        let (good, mut queue) = VmHandle::detached("good");
        tokio::spawn(async move {
            while let Some(request) = queue.recv().await {
                if let Request::Ping(answer) = request {
                    let _ = answer.send(());
                }
            }
        });
        let vms =
            [("hung", Some(hung)), ("full", Some(full)), ("gone", Some(gone)), ("failed", None), ("good", Some(good))];
        let started = Instant::now();

        let answers = ask_all(vms, ANSWER_LIMIT, Request::Ping).await;

        assert_eq!(started.elapsed(), ANSWER_LIMIT);
        let (silent, gone) = (Err(Unanswered::Silent), Err(Unanswered::Gone));
        let wanted = [("hung", silent), ("full", silent), ("gone", gone), ("failed", gone), ("good", Ok(()))];
        assert_eq!(answers, wanted);
    }
}
