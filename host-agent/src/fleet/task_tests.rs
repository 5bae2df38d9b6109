//! The task with VMs whose own tasks are the tests, so that every order of messages can be had.

#![allow(clippy::unwrap_used, clippy::panic)]
use super::*;
use crate::vm::Connected;
use std::path::PathBuf;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

struct Rig {
    task: Task,
    inbox: mpsc::Receiver<Order>,
    dir: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (orders, inbox) = mpsc::channel(64);
        let config = Config { control: dir.path().join("control"), metrics: None, directory: None, vms: Vec::new() };
        let (task, _) = Task::new(&config, orders);
        Self { task, inbox, dir }
    }

    fn vm(&self, name: &str, socket: &str) -> VmConfig {
        VmConfig { socket: Some(self.dir.path().join(socket)), ..VmConfig::new(name) }
    }

    /// A VM whose task is the test.
    fn detached(&mut self, config: VmConfig, state: State) -> (u64, mpsc::Receiver<Request>) {
        let (handle, queue) = VmHandle::detached(&config.name);
        self.task.fail(config, "detached".to_owned());
        let entry = self.task.entries.last_mut().unwrap();
        (entry.state, entry.detail, entry.handle) = (state, None, Some(handle));
        (entry.id, queue)
    }

    fn remove(&mut self, name: &str) -> oneshot::Receiver<Result<(), FleetError>> {
        let (answer, receiver) = oneshot::channel();
        self.task.obey(Order::Remove { name: name.to_owned(), force: Force::No, answer });
        receiver
    }

    fn reload(&mut self, change: impl FnOnce(&mut Config)) -> Reloaded {
        let mut config = self.task.config.clone();
        change(&mut config);
        self.task.reload(Ok(config)).unwrap()
    }

    async fn order(&mut self) -> Order {
        tokio::time::timeout(LIMIT, self.inbox.recv()).await.unwrap().unwrap()
    }

    async fn until(&mut self, name: &str, state: State) {
        while self.state(name) != Some(state) {
            let order = self.order().await;
            self.task.obey(order);
        }
    }

    fn state(&self, name: &str) -> Option<State> {
        self.task.entries.iter().find(|entry| entry.config.name == name).map(|entry| entry.state)
    }

    fn directory(&mut self) -> PathBuf {
        let vms = self.dir.path().join("vm");
        self.task.watch_directory(Some(vms.clone())).unwrap();
        std::fs::create_dir(vms.join("web")).unwrap();
        self.task.look_into_directory();
        assert_eq!(self.state("web"), Some(State::Running));
        vms
    }
}

async fn leave(queue: &mut mpsc::Receiver<Request>, goes: Result<(), Connected>) {
    let Some(Request::Leave(Leave::IfUnused, answer)) = queue.recv().await else { panic!("no Leave") };
    answer.send(goes).unwrap();
}

#[tokio::test]
async fn a_refused_removal_keeps_what_the_vm_is_to_become() {
    for silent in [false, true] {
        let mut rig = Rig::new();
        let (id, mut queue) = rig.detached(rig.vm("a", "a"), State::Changing);
        rig.task.entry("a").unwrap().next = Some((rig.vm("a", "other"), None));
        let answer = rig.remove("a");
        if silent {
            rig.task.obey(Order::Leaves {
                id,
                goes: Err(FleetError::Silent { name: "a".to_owned() }),
                answer: oneshot::channel().0,
            });
        } else {
            leave(&mut queue, Err(Connected { pid: Some(1) })).await;
            let order = rig.order().await;
            rig.task.obey(order);
            assert!(matches!(answer.await, Ok(Err(FleetError::InUse { .. }))));
        }
        let entry = rig.task.entry("a").unwrap();
        assert!(entry.next.is_some() && entry.state == State::Changing);
    }
}

#[tokio::test]
async fn a_removed_vm_stays_away_whichever_message_is_first() {
    for ended_first in [true, false] {
        let mut rig = Rig::new();
        let (id, mut queue) = rig.detached(rig.vm("a", "a"), State::Running);
        let answer = rig.remove("a");
        leave(&mut queue, Ok(())).await;
        let leaves = rig.order().await;
        let ended = Order::Ended { id };
        for order in if ended_first { [ended, leaves] } else { [leaves, ended] } {
            rig.task.obey(order);
        }
        assert!(matches!(answer.await, Ok(Ok(()))));
        assert_eq!(rig.state("a"), None, "it came back");
    }
}

#[tokio::test]
async fn a_vm_that_ends_after_its_removal_was_refused_becomes_what_it_was_to_become() {
    let mut rig = Rig::new();
    let (id, mut queue) = rig.detached(rig.vm("a", "a"), State::Changing);
    rig.task.entry("a").unwrap().next = Some((rig.vm("a", "other"), None));
    let answer = rig.remove("a");
    leave(&mut queue, Err(Connected { pid: None })).await;
    let leaves = rig.order().await;
    rig.task.obey(Order::Ended { id });
    rig.task.obey(leaves);
    assert!(matches!(answer.await, Ok(Err(FleetError::InUse { .. }))));
    assert_eq!(rig.state("a"), Some(State::Running));
    assert!(rig.dir.path().join("other").exists());
}

#[tokio::test]
async fn a_removal_that_nobody_waits_for_any_more_does_not_happen() {
    let mut rig = Rig::new();
    assert_eq!(rig.task.make_or_fail(rig.vm("a", "a"), None), None);
    let handle = rig.task.entry("a").unwrap().handle.clone().unwrap();
    drop(handle.request(|answer| Request::Leave(Leave::Now, answer)).unwrap());
    handle.ask(Request::Ping).await.unwrap();
    // It would end within microseconds.
    assert!(tokio::time::timeout(Duration::from_millis(300), handle.ended()).await.is_err(), "it has ended");
}

#[tokio::test]
async fn a_vm_renamed_in_the_file_waits_for_its_socket_and_is_made() {
    let mut rig = Rig::new();
    let (a, c) = (rig.vm("a", "s"), rig.vm("c", "s"));
    rig.reload(|config| config.vms = vec![a]);
    let reloaded = rig.reload(|config| config.vms = vec![c]);
    assert!(reloaded.failed.is_empty(), "{reloaded:?}");
    assert!(reloaded.waiting["c"].contains("VM a"), "{reloaded:?}");
    assert_eq!(rig.state("c"), Some(State::Changing));
    // The same file once more changes nothing.
    let again = rig.reload(|_| ());
    assert!(again.failed.is_empty() && again.changing.is_empty() && again.removed.is_empty(), "{again:?}");
    rig.until("c", State::Running).await;
    assert_eq!(rig.state("a"), None);
    assert!(rig.dir.path().join("s").exists());
}

#[tokio::test]
async fn two_vms_swap_their_sockets() {
    let mut rig = Rig::new();
    let vms = |one: &str, other: &str| vec![rig.vm("a", one), rig.vm("b", other)];
    let (before, after) = (vms("1", "2"), vms("2", "1"));
    rig.reload(|config| config.vms = before);
    let reloaded = rig.reload(|config| config.vms = after.clone());
    assert_eq!(reloaded.changing, ["a", "b"]);
    for vm in after {
        while rig.task.entry(&vm.name).unwrap().config.socket != vm.socket
            || rig.state(&vm.name) != Some(State::Running)
        {
            let order = rig.order().await;
            rig.task.obey(order);
        }
    }
}

#[tokio::test]
async fn a_name_that_the_file_wants_is_the_files_when_the_other_vm_has_gone() {
    let mut rig = Rig::new();
    let (id, queue) = rig.detached(VmConfig { origin: Origin::Command, ..rig.vm("a", "x") }, State::Running);
    let a = rig.vm("a", "a");
    let reloaded = rig.reload(|config| config.vms = vec![a]);
    assert!(reloaded.failed.contains_key("a"), "{reloaded:?}");
    drop(queue);
    rig.task.entry("a").unwrap().state = State::Stopping;
    rig.task.obey(Order::Ended { id });
    assert_eq!(
        rig.task.entry("a").map(|entry| (entry.state, entry.config.origin)),
        Some((State::Running, Origin::Config))
    );
}

#[tokio::test]
async fn a_directory_that_cannot_be_used_keeps_the_old_one_and_is_tried_again() {
    let mut rig = Rig::new();
    let vms = rig.directory();
    let missing = rig.dir.path().join("missing/vm");
    for _ in 0..2 {
        let reloaded = rig.reload(|config| config.directory = Some(missing.clone()));
        assert!(reloaded.failed["directory"].contains("missing/vm"), "{reloaded:?}");
        assert!(rig.task.config_error.as_ref().unwrap().contains("missing/vm"));
        assert_eq!((&rig.task.config.directory, rig.state("web")), (&Some(vms.clone()), Some(State::Running)));
    }
    std::fs::create_dir(rig.dir.path().join("missing")).unwrap();
    rig.reload(|config| config.directory = Some(missing.clone()));
    assert_eq!((&rig.task.config.directory, &rig.task.config_error), (&Some(missing), &None));
    assert_ne!(rig.state("web"), Some(State::Running));
}

#[tokio::test]
async fn a_directory_that_cannot_be_read_keeps_its_vms_and_one_that_is_gone_does_not() {
    let mut rig = Rig::new();
    let vms = rig.directory();
    rig.task.watcher.take().unwrap().abort();
    std::fs::rename(&vms, rig.dir.path().join("elsewhere")).unwrap();
    std::fs::write(&vms, "").unwrap();
    rig.task.look_into_directory();
    assert_eq!(rig.state("web"), Some(State::Running));
    std::fs::remove_file(&vms).unwrap();
    // Looks again by itself.
    rig.until("web", State::Leaving).await;
}

#[tokio::test]
async fn what_takes_a_restart_is_said_by_every_reload() {
    let mut rig = Rig::new();
    let metrics = crate::metrics::MetricsAddress::Unix(PathBuf::from("/metrics"));
    for _ in 0..2 {
        let reloaded = rig.reload(|config| config.metrics = Some(metrics.clone()));
        assert_eq!(reloaded.notes.len(), 1, "{reloaded:?}");
    }
}

#[tokio::test]
async fn a_vm_that_cannot_be_made_has_left_nothing_when_that_is_said() {
    let mut rig = Rig::new();
    std::fs::write(rig.dir.path().join("file"), "").unwrap();
    let balloon = Some(rig.dir.path().join("file"));
    // Often: the device's thread may be faster by chance.
    for _ in 0..200 {
        let error = rig.task.make_or_fail(VmConfig { balloon: balloon.clone(), ..rig.vm("a", "a") }, None);
        assert!(error.is_some() && !rig.dir.path().join("a").exists(), "{error:?}");
    }
}
