#![allow(clippy::unwrap_used)]

use super::*;
use std::collections::{BTreeMap, BTreeSet};

/// How often each leaf of the sample is reached, by its address: a path leads to places in the same value.
fn reached(paths: impl Iterator<Item = &'static str>, status: &Value) -> BTreeMap<*const Value, Vec<&'static str>> {
    let mut reached: BTreeMap<*const Value, Vec<&'static str>> = BTreeMap::new();
    for path in paths {
        let mut found = false;
        visit(path, status, &mut |_, value| {
            found = true;
            // An object that is only asked whether it is there has leaves with their own entries.
            if !value.is_object() {
                reached.entry(std::ptr::from_ref(value)).or_default().push(path);
            }
        });
        assert!(found, "{path} leads nowhere in the sample: correct it, or give the sample a value there");
    }
    reached
}

#[test]
fn every_leaf_of_the_status_is_one_field_or_said_to_be_no_metric() {
    let status = serde_json::to_value(sample::daemon()).unwrap();
    let vm = &status["vms"][0];
    let is_daemon = |path: &str| status.pointer(path).is_some() && vm.pointer(path).is_none();
    let no_metric = || NO_METRIC.iter().map(|(path, _)| *path);
    let of_daemon = DAEMON.iter().map(|field| field.path).chain(no_metric().filter(|path| is_daemon(path)));
    let of_vm = VM.iter().map(|field| field.path).chain(no_metric().filter(|path| !is_daemon(path)));
    let mut reached_by = reached(of_daemon, &status);
    reached_by.append(&mut reached(of_vm, vm));

    for (path, leaf) in leaves(&status) {
        assert!(!leaf.is_null(), "{path} is null in the sample: give it a value");
        let by = reached_by.remove(&std::ptr::from_ref(leaf)).unwrap_or_default();
        assert!(
            by.len() == 1,
            "{path} is covered by {by:?}: it wants one line in the registry (see the module's text)"
        );
    }
}

#[test]
fn names_are_those_prometheus_wants() {
    let mut names = BTreeSet::new();
    for field in DAEMON.iter().chain(VM) {
        let Field { name, kind, unit, origin, .. } = field;
        assert!(names.insert(name), "{name} is there twice");
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        assert!(name.starts_with("fpr_") && name.chars().all(allowed), "{name}");
        assert_eq!(name.ends_with("_total"), *kind == Kind::Counter, "{name}");
        let stem = name.strip_suffix("_total").unwrap_or(name);
        assert!(stem.ends_with(unit.suffix()), "{name}");
        // OpenMetrics adds these to the names of families of its own.
        assert!(["_count", "_sum", "_bucket", "_created"].iter().all(|suffix| !stem.ends_with(suffix)), "{name}");
        assert_eq!(name.starts_with(GUEST_CLAIMED), *origin == Origin::Guest, "{name}");
        assert!(!field.help.ends_with('.') && !field.help.contains('\n'), "{name}: {}", field.help);
    }
}

#[test]
fn units_are_base_units_and_states_are_complete() {
    let vm = serde_json::to_value(sample::vm("web1")).unwrap();
    let samples = |name: &str| {
        let mut samples = Vec::new();
        Field::named(name).unwrap().samples(&vm, &mut |labels, number| {
            let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
            samples.push((labels.join(","), number));
        });
        samples
    };
    assert_eq!(samples("fpr_busy_seconds_total"), [(String::new(), Number::Float(0.012_345_678))]);
    assert_eq!(samples("fpr_guest_claimed_psi_some_avg10_ratio"), [(String::new(), Number::Float(0.015))]);
    assert_eq!(samples("fpr_gate_closed_seconds"), [("gate=operator,source=operator".into(), Number::Integer(90))]);
    let states: Vec<_> = ["absent", "fencing", "active"]
        .map(|state| (format!("state={state}"), Number::Integer(u64::from(state == "active"))))
        .into();
    assert_eq!(samples("fpr_agent_state"), states);
    assert_eq!(Field::named("fpr_dropped_bytes_total").unwrap().sum(&vm), Some(f64::from(32 << 20)));
    assert_eq!(Field::named("fpr_balloon_chains_total").unwrap().sum(&serde_json::json!({"balloon": null})), None);
}
