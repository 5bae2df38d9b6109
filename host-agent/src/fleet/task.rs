//! The task that owns the set of VMs. It never waits for a VM: what takes time is done by tasks that send their result as
//! an order.

use super::directory::{self, Folder};
use super::plan::{self, Known, Step};
use super::watchdog;
use super::{FleetError, Force, MAX_VMS, Member, Order, Reloaded, STOP_DEADLINE, State, View, unknown};
use crate::config::{self, Config, ConfigError};
use crate::log_limit::RateLimited;
use crate::vm::{self, ANSWER_LIMIT, Leave, MemoryFiles, NotTaken, Origin, Request, VmConfig, VmHandle};
use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{error, info, warn};

pub(super) type Answer = oneshot::Sender<Result<(), FleetError>>;

/// One VM.
pub(super) struct Entry {
    /// Differs from that of an earlier VM of the same name.
    pub(super) id: u64,
    pub(super) config: VmConfig,
    pub(super) state: State,
    pub(super) detail: Option<String>,
    pub(super) handle: Option<VmHandle>,
    /// The folder it came from.
    pub(super) folder: Option<Folder>,
    /// What follows when it has ended.
    pub(super) next: Option<(VmConfig, Option<Folder>)>,
    /// Who waits for its end.
    pub(super) waiting: Vec<Answer>,
    /// Removals that the VM has been asked for and whose answers are on the way.
    pub(super) removals: usize,
    /// Its task has ended; what that means is known when those answers are there.
    pub(super) ended: bool,
}

impl Entry {
    /// Without a task.
    fn unmade(id: u64, config: VmConfig, state: State) -> Self {
        Self {
            id,
            config,
            state,
            detail: None,
            handle: None,
            folder: None,
            next: None,
            waiting: Vec::new(),
            removals: 0,
            ended: false,
        }
    }

    /// Puts a request into the VM's queue, in the order of the calls. Who hangs so long that it is full gets no more.
    fn tell<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Request) {
        if let Some(handle) = &self.handle
            && handle.request(request).err() == Some(NotTaken::Full)
        {
            error!(vm = self.config.name, "the VM's task does not answer");
        }
    }
}

pub(super) struct Task {
    pub(super) orders: mpsc::Sender<Order>,
    pub(super) view: watch::Sender<View>,
    pub(super) entries: Vec<Entry>,
    pub(super) next_id: u64,
    pub(super) memory_files: Arc<MemoryFiles>,
    pub(super) config: Config,
    pub(super) config_error: Option<String>,
    pub(super) watcher: Option<AbortHandle>,
    /// Folders whose VM was removed by command and that could not be removed themselves.
    pub(super) given_up: BTreeMap<String, Folder>,
    pub(super) ending: Option<oneshot::Sender<()>>,
    pub(super) told: String,
    pub(super) log: RateLimited,
    /// VMs of the file whose names somebody else has.
    pub(super) taken: Vec<VmConfig>,
    /// The next look into a directory that could not be read.
    pub(super) look_again: Option<AbortHandle>,
    /// VMs that did not answer in the watchdog's last round.
    pub(super) silent: usize,
    pub(super) silent_log: RateLimited,
}

impl Task {
    pub(super) fn new(config: &Config, orders: mpsc::Sender<Order>) -> (Self, watch::Receiver<View>) {
        let (view, receiver) = watch::channel(View::default());
        let task = Self {
            orders,
            view,
            entries: Vec::new(),
            next_id: 0,
            memory_files: Arc::default(),
            config: config.clone(),
            config_error: None,
            watcher: None,
            given_up: BTreeMap::new(),
            ending: None,
            told: String::new(),
            log: RateLimited::guest_caused(),
            taken: Vec::new(),
            look_again: None,
            silent: 0,
            silent_log: RateLimited::guest_caused(),
        };
        (task, receiver)
    }

    /// Makes the first VMs; one that cannot be made is an error of the start.
    pub(super) async fn start(mut self, vms: Vec<VmConfig>) -> Result<Self, FleetError> {
        let begin = || {
            vms.into_iter().try_for_each(|vm| self.make(vm, None))?;
            self.watch_directory(self.config.directory.clone())
        };
        if let Err(error) = begin() {
            let handles: Vec<_> = self.entries.iter().filter_map(|entry| entry.handle.clone()).collect();
            let ended = handles.into_iter().map(|handle| async move {
                handle.shut_down().await;
                handle.ended().await;
            });
            // Their sockets are not left behind.
            for ended in ended {
                let _ = tokio::time::timeout(STOP_DEADLINE, ended).await;
            }
            return Err(error);
        }
        self.publish();
        Ok(self)
    }

    pub(super) async fn run(mut self, mut inbox: mpsc::Receiver<Order>) {
        let mut rounds = watchdog::period().map(interval);
        if let Some(rounds) = &mut rounds {
            rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        }
        loop {
            let round = async {
                match &mut rounds {
                    Some(rounds) => drop(rounds.tick().await),
                    None => pending().await,
                }
            };
            tokio::select! {
                order = inbox.recv() => match order {
                    Some(order) => self.obey(order),
                    None => return,
                },
                () = round => self.begin_round(),
            }
            self.publish();
            if self.ending.is_some() && self.entries.iter().all(|entry| entry.handle.is_none()) {
                if let Some(answer) = self.ending.take() {
                    let _ = answer.send(());
                }
                return;
            }
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            // Nothing new while everything ends.
            Order::Add { answer, .. } | Order::Remove { answer, .. } if self.ending.is_some() => {
                let _ = answer.send(Err(FleetError::Ending));
            }
            Order::Reload { .. } | Order::FoldersChanged if self.ending.is_some() => {}
            Order::Add { config, answer } => {
                let added = self.add(*config);
                let _ = answer.send(added);
            }
            Order::Remove { name, force, answer } => self.remove(&name, force, answer),
            Order::Leaves { id, goes, answer } => self.leaves(id, goes, answer),
            Order::Reload { config, answer } => {
                let _ = answer.send(self.reload(*config));
            }
            Order::FoldersChanged => self.look_into_directory(),
            Order::Ended { id } => self.ended(id),
            Order::Round { answered, silent } => self.end_round(answered, &silent),
            Order::Shutdown { answer } => self.shut_down(answer),
        }
        self.make_taken();
    }

    /// A name that the file wants and somebody else had is the file's when the other has gone.
    fn make_taken(&mut self) {
        if self.ending.is_some() {
            return;
        }
        let is_free = |vm: &mut VmConfig| self.entries.iter().all(|entry| entry.config.name != vm.name);
        for vm in self.taken.extract_if(.., is_free).collect::<Vec<_>>() {
            self.make_or_fail(vm, None);
        }
    }

    /// Makes a VM's devices and its task.
    fn make(&mut self, mut config: VmConfig, folder: Option<Folder>) -> Result<(), FleetError> {
        if self.entries.iter().filter(|entry| entry.handle.is_some()).count() >= MAX_VMS {
            return Err(FleetError::TooMany);
        }
        for socket in config.socket.iter().chain(&config.balloon) {
            let other = self.entries.iter().find(|entry| {
                entry.handle.is_some()
                    && entry.config.socket.iter().chain(&entry.config.balloon).any(|path| path == socket)
            });
            if let Some(other) = other {
                let (path, other) = (socket.display().to_string(), other.config.name.clone());
                return Err(FleetError::SocketTaken { path, other });
            }
        }
        config.memory_files = Arc::clone(&self.memory_files);
        let name = config.name.clone();
        let (handle, ended) =
            vm::spawn(config.clone()).map_err(|source| FleetError::Spawn { name: name.clone(), source })?;
        let [socket, balloon] =
            [&config.socket, &config.balloon].map(|path| path.as_ref().map(|path| path.display().to_string()));
        info!(vm = name, origin = config.origin.word(), socket, balloon, "waiting for a front end");
        self.next_id += 1;
        let (id, orders) = (self.next_id, self.orders.clone());
        tokio::spawn(async move {
            // A task that panicked has ended, too.
            let _ = ended.await;
            let _ = orders.send(Order::Ended { id }).await;
        });
        self.entries.retain(|entry| entry.config.name != name);
        self.entries.push(Entry { handle: Some(handle), folder, ..Entry::unmade(id, config, State::Running) });
        Ok(())
    }

    /// Makes a VM, or keeps it as one that waits or failed. Says which, and why.
    pub(super) fn make_or_fail(&mut self, config: VmConfig, folder: Option<Folder>) -> Option<(State, String)> {
        let error = self.make(config.clone(), folder).err()?;
        let (state, detail) = match &error {
            // A folder is looked at again whenever a VM has ended; what is kept of it here would lose the folder.
            FleetError::SocketTaken { path, other } if config.origin != Origin::Directory && self.is_going(other) => {
                (State::Changing, format!("waits for VM {other} to end, which has {path}"))
            }
            _ => (State::Failed, crate::error_chain(&error)),
        };
        self.keep_unmade(config, state, detail.clone());
        Some((state, detail))
    }

    fn is_going(&self, name: &str) -> bool {
        let going = |state| matches!(state, State::Leaving | State::Changing | State::Stopping);
        self.entries.iter().any(|entry| entry.config.name == name && going(entry.state))
    }

    pub(super) fn fail(&mut self, config: VmConfig, detail: String) {
        self.keep_unmade(config, State::Failed, detail);
    }

    fn keep_unmade(&mut self, config: VmConfig, state: State, detail: String) {
        let name = config.name.clone();
        let known = self.entries.iter().position(|entry| entry.config.name == name);
        let same = |entry: &Entry| entry.state == state && entry.detail.as_ref() == Some(&detail);
        if let Some(known) = known
            && same(&self.entries[known])
        {
            self.entries[known].config = config;
            return;
        }
        if state != State::Failed {
            info!(vm = name, detail, "made later");
        } else if let Some(suppressed) = self.log.admit(Instant::now()) {
            warn!(vm = name, origin = config.origin.word(), error = detail, suppressed, "no such VM can be made");
        }
        if let Some(known) = known {
            self.entries.remove(known);
        }
        self.next_id += 1;
        self.entries.push(Entry { detail: Some(detail), ..Entry::unmade(self.next_id, config, state) });
    }

    pub(super) fn entry(&mut self, name: &str) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.config.name == name)
    }

    fn add(&mut self, mut config: VmConfig) -> Result<(), FleetError> {
        let name = config.name.clone();
        match self.entry(&name).map(|entry| (entry.state, entry.config.origin)) {
            Some((State::Stopping, _)) => return Err(FleetError::Stopping { name }),
            None | Some((State::Failed, _)) => {}
            Some((_, origin)) => return Err(FleetError::Duplicate { name, origin }),
        }
        let mut folder = None;
        if config.socket.is_none() && config.balloon.is_none() {
            let Some(directory) = &self.config.directory else { return Err(FleetError::NoDevice { name }) };
            let found = config::of_directory(directory, &name)?;
            folder = Some(directory::make_folder(&directory.join(&name))?);
            self.given_up.remove(&name);
            (config.origin, config.socket, config.balloon) = (found.origin, found.socket, found.balloon);
        }
        self.make(config, folder)
    }

    fn remove(&mut self, name: &str, force: Force, answer: Answer) {
        let Some(entry) = self.entry(name) else {
            let _ = answer.send(Err(unknown(name, &self.view.borrow())));
            return;
        };
        let Some(handle) = entry.handle.clone() else {
            let (id, folder) = (entry.id, entry.folder);
            self.entries.retain(|entry| entry.id != id);
            self.give_up_folder(name, folder);
            let _ = answer.send(Ok(()));
            return;
        };
        if entry.state == State::Stopping {
            // It goes for certain, and what was to follow does not.
            entry.next = None;
            entry.waiting.push(answer);
            return;
        }
        entry.removals += 1;
        let (id, name, orders) = (entry.id, name.to_owned(), self.orders.clone());
        let when = if force == Force::Yes { Leave::Now } else { Leave::IfUnused };
        tokio::spawn(async move {
            let goes = match tokio::time::timeout(ANSWER_LIMIT, handle.ask(|answer| Request::Leave(when, answer))).await
            {
                // Ended meanwhile: that is what was wanted.
                Ok(Some(Ok(())) | None) => Ok(()),
                Ok(Some(Err(connected))) => {
                    let front_end =
                        connected.pid.map_or("its process is not known".to_owned(), |pid| format!("pid {pid}"));
                    Err(FleetError::InUse { name, front_end })
                }
                Err(_) => Err(FleetError::Silent { name }),
            };
            let _ = orders.send(Order::Leaves { id, goes, answer }).await;
        });
    }

    fn leaves(&mut self, id: u64, goes: Result<(), FleetError>, answer: Answer) {
        let Some(entry) = self.entries.iter_mut().find(|entry| entry.id == id) else {
            let _ = answer.send(goes);
            return;
        };
        entry.removals -= 1;
        match goes {
            // What it was to become is still in force.
            Err(error) => drop(answer.send(Err(error))),
            Ok(()) => {
                (entry.state, entry.next) = (State::Stopping, None);
                entry.waiting.push(answer);
                if let Some(folder) = entry.folder {
                    // Not to be found again by the next look.
                    self.given_up.insert(entry.config.name.clone(), folder);
                }
            }
        }
        if entry.ended {
            self.ended(id);
        }
    }

    fn ended(&mut self, id: u64) {
        let Some(place) = self.entries.iter().position(|entry| entry.id == id) else { return };
        if self.entries[place].removals > 0 {
            // Whether it was removed or goes for another reason comes from another task.
            self.entries[place].ended = true;
            return;
        }
        let mut entry = self.entries.remove(place);
        let name = entry.config.name.clone();
        if entry.state == State::Running && entry.next.is_none() && self.ending.is_none() {
            error!(vm = name, "the VM's task has ended by itself; please report this");
            entry.next = Some((entry.config.clone(), entry.folder));
        } else if entry.next.is_none() {
            info!(vm = name, "VM removed");
        }
        if self.ending.is_some() {
            entry.next = None;
        }
        if self.given_up.contains_key(&name) && entry.next.is_none() {
            self.give_up_folder(&name, entry.folder);
        }
        for answer in entry.waiting {
            let _ = answer.send(Ok(()));
        }
        if let Some((config, folder)) = entry.next {
            self.make_or_fail(config, folder);
        }
        if self.ending.is_none() {
            self.retry_failed();
        }
    }

    /// What one VM had may be what another lacked.
    fn retry_failed(&mut self) {
        let unmade = self.entries.iter().filter(|entry| entry.handle.is_none() && !entry.is_refused_folder());
        for config in unmade.map(|entry| entry.config.clone()).collect::<Vec<_>>() {
            self.make_or_fail(config, None);
        }
        self.look_into_directory();
    }

    /// Ends a VM when its front end has gone; then `next` follows.
    pub(super) fn leave(&mut self, name: &str, next: Option<(VmConfig, Option<Folder>)>) {
        let Some(entry) = self.entry(name) else { return };
        let changes = next.is_some();
        entry.next = next;
        if entry.handle.is_none() {
            let (id, next) = (entry.id, entry.next.take());
            self.entries.retain(|entry| entry.id != id);
            if let Some((config, folder)) = next {
                self.make_or_fail(config, folder);
            }
            return;
        }
        if entry.state == State::Stopping {
            return;
        }
        entry.state = if changes { State::Changing } else { State::Leaving };
        entry.detail = Some("waits for its front end to go".to_owned());
        // Its end comes as an order of its own.
        entry.tell(|answer| Request::Leave(Leave::WhenUnused, answer));
    }

    fn reload(&mut self, config: Result<Config, ConfigError>) -> Result<Reloaded, ConfigError> {
        let config = match config {
            Ok(config) => config,
            Err(error) => {
                let chain = crate::error_chain(&error);
                warn!(error = chain, "the old configuration stays in force");
                self.config_error = Some(chain);
                return Err(error);
            }
        };
        self.config_error = None;
        let mut reloaded = Reloaded::default();
        let known = self.entries.iter().map(|entry| Known {
            config: entry.next.as_ref().map_or(&entry.config, |(config, _)| config),
            state: entry.state,
        });
        let steps = plan::reload(&known.collect::<Vec<_>>(), &config.vms);
        self.taken.clear();
        for step in steps {
            self.take(step, &mut reloaded);
        }
        if config.control != self.config.control {
            let control = self.config.control.display();
            reloaded.notes.push(format!("`control` stays {control} until the daemon is started again"));
        }
        if config.metrics != self.config.metrics {
            reloaded.notes.push("`metrics` stays as it is until the daemon is started again".to_owned());
        }
        let directory = config.directory.clone();
        let moved = directory != self.config.directory;
        // What is in force stays, so that the next reload finds the difference again.
        let Config { control, metrics, directory: watched, .. } = self.config.clone();
        self.config = Config { control, metrics, directory: watched, ..config };
        if moved && let Err(error) = self.watch_directory(directory) {
            let error = crate::error_chain(&error);
            warn!(error, "the old VM directory stays in force");
            self.config_error = Some(format!("directory: {error}"));
            reloaded.failed.insert("directory".to_owned(), error);
        }
        let Reloaded { added, removed, changed, changing, waiting, failed, .. } = &reloaded;
        info!(?added, ?removed, ?changed, ?changing, ?waiting, ?failed, "configuration read again");
        Ok(reloaded)
    }

    fn take(&mut self, step: Step, reloaded: &mut Reloaded) {
        match step {
            Step::Add(vm) => {
                let name = vm.name.clone();
                match self.make_or_fail(vm, None) {
                    Some((State::Failed, error)) => drop(reloaded.failed.insert(name, error)),
                    Some((_, what)) => drop(reloaded.waiting.insert(name, what)),
                    None => reloaded.added.push(name),
                }
            }
            Step::Leave(name) => {
                self.leave(&name, None);
                reloaded.removed.push(name);
            }
            Step::Change(vm) => {
                reloaded.changing.push(vm.name.clone());
                self.leave(&vm.name.clone(), Some((vm, None)));
            }
            Step::Stay(vm) => {
                let Some(entry) = self.entry(&vm.name) else { return };
                // It may have begun to end already; then it begins anew.
                entry.next = Some((vm.clone(), None));
                if entry.state != State::Stopping {
                    (entry.state, entry.detail) = (State::Running, None);
                }
                entry.tell(Request::Stay);
                self.apply(vm.clone());
                reloaded.changed.push(vm.name);
            }
            Step::Apply(vm) => {
                reloaded.changed.push(vm.name.clone());
                self.apply(vm);
            }
            Step::Taken(vm, origin) => {
                let name = vm.name.clone();
                self.taken.push(vm);
                let error = FleetError::Duplicate { name: name.clone(), origin };
                reloaded.failed.insert(name, error.to_string());
            }
        }
    }

    /// New values for a VM whose devices stay.
    fn apply(&mut self, vm: VmConfig) {
        let Some(entry) = self.entry(&vm.name) else { return };
        if entry.config.inhibit != vm.inhibit {
            match vm.inhibit.clone() {
                Some(reason) => entry.tell(|answer| Request::Inhibit(reason, answer)),
                None => entry.tell(Request::Resume),
            }
        }
        if let Some((next, _)) = &mut entry.next {
            *next = vm.clone();
        }
        (entry.config.inhibit, entry.config.budget_bytes) = (vm.inhibit, vm.budget_bytes);
        entry.config.origin = vm.origin;
    }

    fn shut_down(&mut self, answer: oneshot::Sender<()>) {
        if let Some(watcher) = self.watcher.take() {
            watcher.abort();
        }
        if let Some(look) = self.look_again.take() {
            look.abort();
        }
        self.entries.retain(|entry| entry.handle.is_some());
        for entry in &mut self.entries {
            entry.state = State::Stopping;
            if let Some(handle) = entry.handle.clone() {
                // A full queue of one VM does not delay the others.
                tokio::spawn(async move { handle.shut_down().await });
            }
        }
        self.ending = Some(answer);
    }

    /// Shows everybody what there is now, and the service manager how many.
    fn publish(&mut self) {
        let members: Arc<[Member]> = self.entries.iter().map(member).collect();
        let running = members.iter().filter(|member| member.handle.is_some()).count();
        let failed = members.iter().filter(|member| member.state == State::Failed).count();
        let line = watchdog::status_line(running, failed, self.silent, self.config_error.as_deref());
        if line != self.told {
            watchdog::notify(&[sd_notify::NotifyState::Status(&line)]);
            self.told = line;
        }
        self.view.send_replace(View { members, config_error: self.config_error.clone() });
    }
}

pub(super) fn member(entry: &Entry) -> Member {
    Member {
        name: entry.config.name.clone(),
        origin: entry.config.origin,
        state: entry.state,
        detail: entry.detail.clone(),
        handle: entry.handle.clone(),
        config: (entry.config.socket.is_some() || entry.config.balloon.is_some())
            .then(|| Arc::new(entry.config.clone())),
    }
}

#[cfg(test)]
#[path = "task_tests.rs"]
mod tests;
