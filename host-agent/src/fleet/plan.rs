//! What a new configuration, or a look into the VM directory, changes. Pure: two states in, steps out.
//!
//! Called by the fleet's task. VMs of `vm add` and of the directory are not the configuration's affair, and the reverse; a
//! name belongs to whoever had it first, with one exception: a VM that was added by command and then written into the
//! file, with the same devices, is the file's from then on.

use super::State;
use crate::vm::{Origin, VmConfig};

/// A VM that is there.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    /// What makes it up, or will when it has changed.
    pub config: &'a VmConfig,
    /// What it is doing.
    pub state: State,
}

/// One thing to do.
#[derive(Clone, Debug)]
pub enum Step {
    /// Make it.
    Add(VmConfig),
    /// End it when its front end has gone.
    Leave(String),
    /// It was leaving or changing, and now stays as it is.
    Stay(VmConfig),
    /// Give it other devices when its front end has gone.
    Change(VmConfig),
    /// Give it these values now; its devices stay.
    Apply(VmConfig),
    /// The name is somebody else's; make it when that one has gone.
    Taken(VmConfig, Origin),
}

fn of_configuration(origin: Origin) -> bool {
    matches!(origin, Origin::Config | Origin::Flag)
}

/// From the VMs that are there to those of a configuration.
#[must_use]
pub fn reload(known: &[Known<'_>], wanted: &[VmConfig]) -> Vec<Step> {
    let mut steps: Vec<Step> = known
        .iter()
        .filter(|vm| of_configuration(vm.config.origin) && !matches!(vm.state, State::Leaving))
        .filter(|vm| wanted.iter().all(|wanted| wanted.name != vm.config.name))
        .map(|vm| Step::Leave(vm.config.name.clone()))
        .collect();
    for wanted in wanted {
        let Some(vm) = known.iter().find(|vm| vm.config.name == wanted.name) else {
            steps.push(Step::Add(wanted.clone()));
            continue;
        };
        let same = same_devices(vm.config, wanted);
        steps.extend(match vm.state {
            _ if is_of_others(vm.config.origin, same) => Some(Step::Taken(wanted.clone(), vm.config.origin)),
            // Nothing of it is there that would have to go first.
            State::Failed => Some(Step::Add(wanted.clone())),
            State::Leaving | State::Stopping if same => Some(Step::Stay(wanted.clone())),
            _ if !same => Some(Step::Change(wanted.clone())),
            _ if same_values(vm.config, wanted) => None,
            _ => Some(Step::Apply(wanted.clone())),
        });
    }
    // Last: by then every VM whose socket a new one may take over is known to go.
    steps.sort_by_key(|step| matches!(step, Step::Add(_)));
    steps
}

fn is_of_others(origin: Origin, same_devices: bool) -> bool {
    match origin {
        Origin::Config | Origin::Flag => false,
        Origin::Command => !same_devices,
        Origin::Directory => true,
    }
}

/// What the devices are made with.
#[must_use]
pub fn same_devices(one: &VmConfig, other: &VmConfig) -> bool {
    (&one.socket, &one.balloon, one.guest_cid) == (&other.socket, &other.balloon, other.guest_cid)
}

fn same_values(one: &VmConfig, other: &VmConfig) -> bool {
    (&one.inhibit, one.budget_bytes, one.origin) == (&other.inhibit, other.budget_bytes, other.origin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn vm(name: &str, socket: &str) -> VmConfig {
        VmConfig { socket: Some(PathBuf::from(socket)), ..VmConfig::new(name) }
    }

    fn steps(known: &[(VmConfig, State)], wanted: &[VmConfig]) -> Vec<String> {
        let known: Vec<_> = known.iter().map(|(config, state)| Known { config, state: *state }).collect();
        let text = |step: Step| match step {
            Step::Add(vm) => format!("add {}", vm.name),
            Step::Leave(name) => format!("leave {name}"),
            Step::Stay(vm) => format!("stay {}", vm.name),
            Step::Change(vm) => format!("change {}", vm.name),
            Step::Apply(vm) => format!("apply {}", vm.name),
            Step::Taken(vm, origin) => format!("taken {} {}", vm.name, origin.word()),
        };
        reload(&known, wanted).into_iter().map(text).collect()
    }

    #[test]
    fn what_did_not_change_is_not_touched() {
        let known = [(vm("a", "/a"), State::Running), (vm("b", "/b"), State::Changing)];
        assert!(steps(&known, &[vm("b", "/b"), vm("a", "/a")]).is_empty());
    }

    #[test]
    fn vms_come_and_go_and_devices_change() {
        let known = [(vm("a", "/a"), State::Running), (vm("b", "/b"), State::Running), (vm("d", "/d"), State::Leaving)];
        assert_eq!(steps(&known, &[vm("b", "/x"), vm("c", "/c")]), ["leave a", "change b", "add c"]);
    }

    #[test]
    fn new_vms_come_when_those_whose_sockets_they_take_are_known_to_go() {
        let known = [(vm("b", "/b"), State::Running)];
        assert_eq!(steps(&known, &[vm("a", "/b"), vm("b", "/x")]), ["change b", "add a"]);
    }

    #[test]
    fn values_are_applied_and_who_was_leaving_stays() {
        let known = [(vm("a", "/a"), State::Running), (vm("b", "/b"), State::Leaving)];
        let a = VmConfig { budget_bytes: Some(1 << 30), ..vm("a", "/a") };
        assert_eq!(steps(&known, &[a, vm("b", "/b")]), ["apply a", "stay b"]);
        assert_eq!(steps(&known, &[vm("a", "/a"), vm("b", "/x")]), ["change b"]);
        let inhibited = VmConfig { inhibit: Some("backup".to_owned()), ..vm("a", "/a") };
        assert_eq!(steps(&known, &[inhibited, vm("b", "/b")]), ["apply a", "stay b"]);
    }

    #[test]
    fn what_failed_is_tried_again() {
        assert_eq!(steps(&[(vm("a", "/a"), State::Failed)], &[vm("a", "/a")]), ["add a"]);
    }

    #[test]
    fn vms_of_others_are_left_alone_and_names_are_theirs() {
        let command = VmConfig { origin: Origin::Command, ..vm("a", "/a") };
        let folder = VmConfig { origin: Origin::Directory, ..vm("b", "/b") };
        let known = [(command, State::Running), (folder, State::Running)];
        assert!(steps(&known, &[]).is_empty());
        assert_eq!(steps(&known, &[vm("a", "/x"), vm("b", "/b")]), ["taken a command", "taken b directory"]);
        // Written into the file as it is: the file's from now on.
        assert_eq!(steps(&known, &[vm("a", "/a")]), ["apply a"]);
    }
}
