//! Who is served on the control socket, and how many at a time.
//!
//! Called by the control socket's task. Its clients are operators and their scripts, some of them stuck: a connection
//! waits for its request among at most [`MAX_WAITING`], and the oldest gives way to a new one. With its request it takes
//! one of [`MAX_CLIENTS`] slots until it has its answer; a drain takes one of [`MAX_DRAINS`] instead, as it may wait for
//! minutes.

use super::{Answer, Command, TIMEOUT};
use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

/// Longest request in bytes.
const MAX_REQUEST: u64 = 4096;
/// Requests answered at a time.
const MAX_CLIENTS: usize = 16;
/// Drains at a time, of all VMs together.
const MAX_DRAINS: usize = 8;
/// Connections whose request has not come or has no slot yet. More than a burst of honest clients, since the oldest of
/// them is closed for one more.
const MAX_WAITING: usize = 64;

#[derive(Clone)]
struct Slots {
    clients: Arc<Semaphore>,
    drains: Arc<Semaphore>,
}

impl Slots {
    /// A slot for a command, or why there is none.
    async fn take(&self, command: &Command) -> Result<OwnedSemaphorePermit, Answer> {
        if matches!(command, Command::Drain { .. }) {
            let busy =
                |_| Answer::Error(format!("{MAX_DRAINS} drains are waiting already: try again when one has ended"));
            return Arc::clone(&self.drains).try_acquire_owned().map_err(busy);
        }
        match tokio::time::timeout(TIMEOUT, Arc::clone(&self.clients).acquire_owned()).await {
            Ok(Ok(slot)) => Ok(slot),
            Ok(Err(_)) | Err(_) => {
                Err(Answer::Error(format!("{MAX_CLIENTS} requests are being answered already: try again")))
            }
        }
    }
}

/// Accepts and answers until the task is aborted.
pub(super) async fn serve<O, F>(listener: UnixListener, obey: O)
where
    O: Fn(Command) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    let slots = Slots { clients: Arc::new(Semaphore::new(MAX_CLIENTS)), drains: Arc::new(Semaphore::new(MAX_DRAINS)) };
    let mut waiting: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                waiting.retain(|client| !client.is_finished());
                if waiting.len() >= MAX_WAITING
                    && let Some(oldest) = waiting.pop_front()
                {
                    oldest.abort();
                }
                let client = tokio::spawn(receive(stream, slots.clone(), obey.clone()));
                waiting.push_back(client.abort_handle());
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept on the control socket");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

/// Until the request has come and has a slot; then it is answered in a task that nobody aborts.
async fn receive<O, F>(stream: UnixStream, slots: Slots, obey: O)
where
    O: Fn(Command) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    let (read, write) = stream.into_split();
    let mut line = Vec::new();
    let mut reader = BufReader::new(read.take(MAX_REQUEST));
    // A client that is late or gone gets no answer; there is nobody to tell.
    let Ok(Ok(_)) = tokio::time::timeout(TIMEOUT, reader.read_until(b'\n', &mut line)).await else { return };
    if line.is_empty() {
        return;
    }
    let command = match serde_json::from_slice::<Command>(&line) {
        Ok(command) => command,
        Err(error) => {
            let error = Answer::Error(format!("no request of at most {MAX_REQUEST} bytes: {error}"));
            return send(write, &error).await;
        }
    };
    match slots.take(&command).await {
        Ok(slot) => {
            let limit = command.wait() + TIMEOUT;
            let answer = obey(command);
            tokio::spawn(async move {
                let answer = tokio::time::timeout(limit, answer).await.unwrap_or_else(|_| late(limit));
                send(write, &answer).await;
                drop(slot);
            });
        }
        Err(busy) => send(write, &busy).await,
    }
}

fn late(limit: Duration) -> Answer {
    let limit_s = limit.as_secs();
    Answer::Error(format!(
        "not done within {limit_s} s, and may still be done: see `status` and the daemon's log, then try again"
    ))
}

async fn send(mut write: OwnedWriteHalf, answer: &Answer) {
    let Ok(mut bytes) = serde_json::to_vec(answer) else { return };
    bytes.push(b'\n');
    // A client that does not read loses its answer.
    let _ = tokio::time::timeout(TIMEOUT, write.write_all(&bytes)).await;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::path::Path;

    /// A socket whose drains never end.
    fn start(path: &Path) -> tokio::task::JoinHandle<()> {
        let listener = UnixListener::bind(path).unwrap();
        tokio::spawn(serve(listener, |command| async move {
            match command {
                Command::Drain { .. } => std::future::pending().await,
                _ => Answer::Done,
            }
        }))
    }

    /// One that has sent its request.
    async fn request(path: &Path, request: &str) -> UnixStream {
        let mut stream = UnixStream::connect(path).await.unwrap();
        stream.write_all(format!("{request}\n").as_bytes()).await.unwrap();
        stream
    }

    async fn answer(mut stream: UnixStream) -> String {
        let mut answer = String::new();
        // Far below every time limit of the server.
        let limit = Duration::from_secs(2);
        tokio::time::timeout(limit, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        answer.trim().to_owned()
    }

    const STATUS: &str = r#"{"command":"status"}"#;
    const DRAIN: &str = r#"{"command":"drain","vm":"web1","wait_s":600}"#;

    #[tokio::test]
    async fn drains_leave_the_slots_to_others_and_are_refused_by_name_beyond_their_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let _server = start(&path);

        let mut drains = Vec::new();
        for _ in 0..MAX_DRAINS {
            drains.push(request(&path, DRAIN).await);
        }
        // Connections are taken in order, requests are not: until each drain has its slot, one more may get it.
        let refused = loop {
            let mut stream = request(&path, DRAIN).await;
            let mut byte = [0];
            match tokio::time::timeout(Duration::from_millis(200), stream.read_exact(&mut byte)).await {
                Ok(read) => {
                    read.unwrap();
                    break answer(stream).await;
                }
                Err(_) => drains.push(stream),
            }
            assert!(drains.len() < 3 * MAX_CLIENTS, "no drain is refused");
        };

        assert!(refused.contains("8 drains are waiting already"), "{refused}");
        assert_eq!(answer(request(&path, STATUS).await).await, "\"done\"");
    }

    #[tokio::test]
    async fn idle_connections_give_way_to_new_ones_oldest_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let _server = start(&path);

        let mut idle = VecDeque::new();
        for _ in 0..=MAX_WAITING {
            idle.push_back(UnixStream::connect(&path).await.unwrap());
        }
        assert_eq!(answer(request(&path, STATUS).await).await, "\"done\"");

        assert_eq!(answer(idle.pop_front().unwrap()).await, "", "the oldest is closed");
        let mut youngest = idle.pop_back().unwrap();
        youngest.write_all(format!("{STATUS}\n").as_bytes()).await.unwrap();
        assert_eq!(answer(youngest).await, "\"done\"");
    }
}
