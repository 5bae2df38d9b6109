//! Isolation: keeping everybody in the guest off memory while the host drops it.
//!
//! Two mechanisms, both executors without policy. [`offline`] takes wholly free memory blocks offline, [`claim`]
//! allocates free huge pages. The agent's state machine decides what to isolate and when to give it back;
//! [`worker`] runs the slow calls beside the main loop. [`journal`] writes down what must outlive the agent.
//!
//! Trusts the kernel and the directories it is given; a block or a huge page that is not in the journal or not in
//! the agent's own hugetlbfs mount is never touched.
//!
//! Order of use: [`journal::RunLock::acquire`], [`journal::Journal::open`], then, once the host has fenced the
//! earlier session, [`offline::MemoryBlocks::recover`] and [`claim::HugePageClaims::recover`], and only then new work.

pub mod claim;
pub mod hugetlb;
pub mod journal;
pub mod offline;
#[allow(unsafe_code)]
mod sys;
pub mod worker;
