//! Walking the JSON of `status` along the path of a field.

use serde_json::Value;

/// Names and values of a sample's labels.
pub type Labels<'a> = Vec<(&'static str, &'a str)>;

/// Calls `each` with everything that `path` leads to in `value`, null included; nothing where the path breaks off.
pub fn visit<'a>(path: &'static str, value: &'a Value, each: &mut dyn FnMut(&Labels<'a>, &'a Value)) {
    walk(path.strip_prefix('/').unwrap_or(path), value, &mut Vec::new(), each);
}

fn walk<'a>(
    path: &'static str,
    value: &'a Value,
    labels: &mut Labels<'a>,
    each: &mut dyn FnMut(&Labels<'a>, &'a Value),
) {
    let (step, rest) = match path.split_once('/') {
        Some((step, rest)) => (step, Some(rest)),
        None => (path, None),
    };
    let mut go = |value: &'a Value, labels: &mut Labels<'a>| match rest {
        Some(rest) => walk(rest, value, labels, each),
        None => each(labels, value),
    };
    if let Some(label) = step.strip_prefix('{').and_then(|step| step.strip_suffix('}')) {
        let (label, only) = match label.split_once('=') {
            Some((label, only)) => (label, Some(only)),
            None => (label, None),
        };
        for (key, value) in value.as_object().into_iter().flatten() {
            if only.is_none_or(|only| only.split('|').any(|name| name == key)) {
                labels.push((label, key));
                go(value, labels);
                labels.pop();
            }
        }
    } else if let Some(members) = step.strip_prefix('[').and_then(|step| step.strip_suffix(']')) {
        for element in value.as_array().into_iter().flatten() {
            let before = labels.len();
            labels.extend(members.split(',').filter_map(|member| Some((member, element.get(member)?.as_str()?))));
            go(element, labels);
            labels.truncate(before);
        }
    } else {
        let member = match value {
            Value::Array(array) => step.parse().ok().and_then(|index: usize| array.get(index)),
            value => value.get(step),
        };
        if let Some(member) = member {
            go(member, labels);
        }
    }
}

/// The concrete path of every scalar in `value`, and of every empty object or array; what a path of a field leads to is
/// found among them.
#[must_use]
pub fn leaves(value: &Value) -> Vec<(String, &Value)> {
    let mut found = Vec::new();
    collect(value, String::new(), &mut found);
    found
}

fn collect<'a>(value: &'a Value, path: String, found: &mut Vec<(String, &'a Value)>) {
    match value {
        Value::Object(object) if !object.is_empty() => {
            object.iter().for_each(|(key, value)| collect(value, format!("{path}/{key}"), found));
        }
        Value::Array(array) if !array.is_empty() => {
            array.iter().enumerate().for_each(|(index, value)| collect(value, format!("{path}/{index}"), found));
        }
        _ => found.push((path, value)),
    }
}
