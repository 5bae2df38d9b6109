//! The Grafana board and the alert examples against the registry: they parse, and every metric in them exists.

use std::collections::BTreeSet;
use std::path::Path;

use fpr_host_agent::fields::Field;
use saphyr::{LoadableYamlNode, Yaml};

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../pkg").join(path)).unwrap()
}

/// Words that begin like a metric. A recording rule of ours has a colon before that.
fn metrics(text: &str) -> BTreeSet<&str> {
    let in_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    text.split(|c: char| !in_word(c)).filter(|word| word.starts_with("fpr_")).collect()
}

fn assert_all_exist(what: &str, expression: &str) {
    let metrics = metrics(expression);
    let unknown: Vec<_> = metrics.iter().filter(|name| Field::named(name).is_none()).collect();
    assert!(unknown.is_empty(), "{what}: {unknown:?} are no metrics");
    let recorded = expression.contains(":fpr_");
    assert!(!metrics.is_empty() || recorded, "{what} shows no metric: {expression}");
}

#[test]
fn every_panel_of_the_board_shows_metrics_that_exist() {
    let board: serde_json::Value = serde_json::from_str(&read("grafana/fpr.json")).unwrap();
    let panels = board["panels"].as_array().unwrap();
    let mut ids = BTreeSet::new();
    let mut expressions = 0;
    for panel in panels {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: its id is another's, too");
        if panel["type"] == "row" {
            continue;
        }
        for target in panel["targets"].as_array().unwrap() {
            assert_all_exist(title, target["expr"].as_str().unwrap());
            expressions += 1;
        }
        // What guests claim has a row of its own.
        let claimed = panel["targets"].to_string().contains("guest_claimed");
        let say = title.contains("as the agent says");
        assert_eq!(claimed, say, "{title}");
    }
    assert!(expressions > 15, "{expressions}");
    for variable in board["templating"]["list"].as_array().unwrap() {
        if let Some(query) = variable["definition"].as_str() {
            assert_all_exist("a variable", query);
        }
    }
}

#[test]
fn every_alert_asks_for_metrics_that_exist() {
    let text = read("prometheus/fpr.rules.yml");
    let rules = Yaml::load_from_str(&text).unwrap();
    let rules = rules[0]["groups"][0]["rules"].as_vec().unwrap();
    let mut alerts = BTreeSet::new();
    let mut recorded = BTreeSet::new();
    for rule in rules {
        let expression = rule["expr"].as_str().unwrap();
        if let Some(name) = rule.as_mapping_get("record").and_then(Yaml::as_str) {
            assert_all_exist(name, expression);
            recorded.insert(name);
            continue;
        }
        let name = rule["alert"].as_str().unwrap();
        assert!(alerts.insert(name), "{name} is there twice");
        assert_all_exist(name, expression);
        for used in expression.split_whitespace().filter(|word| word.contains(":fpr_")) {
            assert!(recorded.contains(used), "{name} uses {used}, which no rule before it records");
        }
        for annotation in ["summary", "description"] {
            assert!(
                rule["annotations"][annotation].as_str().is_some_and(|text| text.len() > 20),
                "{name}: {annotation}"
            );
        }
    }
    for alert in ["FprDaemonDown", "FprBudgetCrossed", "FprGateClosed", "FprVmReportsNothing", "FprRefaultsHigh"] {
        assert!(alerts.contains(alert), "{alert} is gone");
    }
    // Each alert has a case in the file for promtool.
    let tests = read("prometheus/fpr.rules.test.yml");
    assert!(Yaml::load_from_str(&tests).is_ok());
    assert!(alerts.iter().all(|alert| tests.contains(&format!("alertname: {alert}"))), "{alerts:?}");
}

#[test]
fn unknown_metrics_are_found() {
    assert_eq!(
        metrics("sum(rate(fpr_a_total{vm=\"x\"}[5m])) / vm:fpr_b:ratio > fpr_c"),
        BTreeSet::from(["fpr_a_total", "fpr_c"])
    );
}
