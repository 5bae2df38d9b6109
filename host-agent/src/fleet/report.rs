//! What people and programs are told of the VMs and of a reload.

use super::{Member, State};
use crate::vm::ANSWER_LIMIT;
use crate::vm::Origin;
use crate::vm::status::VmStatus;
use serde::Serialize;
use std::collections::BTreeMap;

/// A VM's figures, if it answered.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Figures {
    /// It did.
    Answered(Box<VmStatus>),
    /// It did not, or there is nobody to ask.
    Unanswered {
        /// Its name.
        name: String,
    },
}

/// One VM in `status`.
#[derive(Clone, Debug, Serialize)]
pub struct VmReport {
    /// Its name and figures.
    #[serde(flatten)]
    pub figures: Figures,
    /// Who wants it.
    pub origin: Origin,
    /// What it is doing.
    pub state: State,
    /// Why it failed, or what it waits for.
    pub state_detail: Option<String>,
}

impl VmReport {
    /// Of a VM that was asked; `None` did not answer.
    #[must_use]
    pub fn new(member: Member, status: Option<VmStatus>) -> Self {
        let asked = member.handle.is_some() && member.state != State::Stopping;
        let silent = asked && status.is_none();
        let limit = ANSWER_LIMIT.as_secs();
        Self {
            origin: member.origin,
            state: if silent { State::Unresponsive } else { member.state },
            state_detail: if silent {
                Some(format!("its task did not answer within {limit} s"))
            } else {
                member.detail
            },
            figures: match status {
                Some(status) => Figures::Answered(Box::new(status)),
                None => Figures::Unanswered { name: member.name },
            },
        }
    }
}

#[cfg(test)]
impl VmReport {
    /// The figures of a VM that answered.
    pub(crate) fn answered(&mut self) -> Option<&mut VmStatus> {
        match &mut self.figures {
            Figures::Answered(status) => Some(status),
            Figures::Unanswered { .. } => None,
        }
    }
}

/// What a reload did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reloaded {
    /// VMs that are new.
    pub added: Vec<String>,
    /// VMs that are not wanted any more; with a front end they wait for it to go.
    pub removed: Vec<String>,
    /// VMs with new values, all in force.
    pub changed: Vec<String>,
    /// VMs with new devices, which begin anew when their front end has gone.
    pub changing: Vec<String>,
    /// New VMs that wait for another one to end, and for which.
    pub waiting: BTreeMap<String, String>,
    /// VMs that could not be made, and why.
    pub failed: BTreeMap<String, String>,
    /// What takes a restart of the daemon.
    pub notes: Vec<String>,
}
