//! docs/metrics.md against the registry. `FPR_UPDATE_DOCS=1 cargo test -p fpr-host-agent --test metrics` writes it anew.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use fpr_host_agent::fields::{DAEMON, Field, Kind, Origin, VM};

fn workspace(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

const BEGIN: &str = "<!-- generated: begin -->\n";
const END: &str = "<!-- generated: end -->\n";

fn table(fields: impl Iterator<Item = &'static Field>) -> String {
    let mut text =
        String::from("| metric | type | labels | meaning | in `status --json` |\n| --- | --- | --- | --- | --- |\n");
    for field in fields {
        let kind = if field.kind == Kind::Counter { "counter" } else { "gauge" };
        let of_vm = VM.iter().any(|of_vm| of_vm.name == field.name);
        let inner = field.path.split(['{', '[']).skip(1).filter_map(|part| part.split(['}', ']', '=']).next());
        let own = match field.kind {
            Kind::State(_) => Some("state"),
            Kind::Info(label) => Some(label),
            _ => None,
        };
        let labels: Vec<String> = of_vm
            .then_some("vm")
            .into_iter()
            .chain(inner.flat_map(|names| names.split(',')))
            .chain(own)
            .map(|label| format!("`{label}`"))
            .collect();
        let states = match field.kind {
            Kind::State(states) => format!(": {}", states.join(", ")),
            _ => String::new(),
        };
        let Field { name, help, path, .. } = field;
        let path = path.replace('|', "\\|");
        writeln!(text, "| `{name}` | {kind} | {} | {help}{states} | `{path}` |", labels.join(", ")).unwrap();
    }
    text
}

fn generated() -> String {
    let of = |origin| DAEMON.iter().chain(VM).filter(move |field| field.origin == origin);
    format!(
        "### Counted and measured by the host\n\n{}\n### Claimed by the guest\n\n{}",
        table(of(Origin::Host)),
        table(of(Origin::Guest))
    )
}

#[test]
fn the_list_of_metrics_is_that_of_the_registry() {
    let path = workspace("docs/metrics.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("the mark where the list begins");
    let (_, after) = rest.split_once(END).expect("the mark where the list ends");
    let wanted = format!("{before}{BEGIN}\n{}\n{END}{after}", generated());
    if std::env::var_os("FPR_UPDATE_DOCS").is_some() {
        std::fs::write(&path, &wanted).unwrap();
    } else {
        assert_eq!(text, wanted, "run again with FPR_UPDATE_DOCS=1 if the change is meant");
    }
}
