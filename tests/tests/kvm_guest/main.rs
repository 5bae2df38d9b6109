//! Tier 2: real KVM guests of a few instructions, made with [`fpr_host_agent::kvm::guest`].
//!
//! Skipped, and counted as skipped, where `/dev/kvm` cannot run them.

#![cfg(target_arch = "x86_64")]
#![deny(unsafe_code)]

mod bounded;
mod machine;
mod program;
mod reporting;
#[allow(unsafe_code)]
mod sys;

use fpr_host_agent::kvm;
use fpr_tests::skip;

/// Whether small guests run here; if not, `test` is skipped.
fn runs_here(test: &str) -> bool {
    let ability = kvm::probe();
    if !ability.runs_small_guests() {
        skip::skip(test, &ability.to_string());
    }
    ability.runs_small_guests()
}
