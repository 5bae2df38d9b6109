//! `/proc/cmdline`, read the way the kernel reads it (`parse_args`, `kernel/params.c`; `next_arg`, `lib/cmdline.c`).
//!
//! Called by [`super::detect`].

/// Value of parameter `name`, the last one that the kernel took for a truth value. `None` if there is none.
///
/// The kernel's rules: words are split at white space outside double quotes; `-` and `_` are the same in names; what
/// follows `--` is for init; a later parameter overrides an earlier one; a value that is no truth value changes nothing.
#[must_use]
pub fn truth(command_line: &str, name: &str) -> Option<bool> {
    words(command_line).filter_map(|word| value(word, name)).filter_map(kernel_bool).last()
}

/// The last value of parameter `name`.
#[must_use]
pub fn last<'a>(command_line: &'a str, name: &str) -> Option<&'a str> {
    words(command_line).filter_map(|word| value(word, name)).last()
}

/// Words of the kernel's part of the line.
fn words(command_line: &str) -> impl Iterator<Item = &str> {
    let mut in_quotes = false;
    command_line
        .split(move |c: char| {
            in_quotes ^= c == '"';
            c.is_ascii_whitespace() && !in_quotes
        })
        .filter(|word| !word.is_empty())
        .take_while(|word| *word != "--")
}

/// The value if `word` is `name=value`, quotes around word or value taken off.
fn value<'a>(word: &'a str, name: &str) -> Option<&'a str> {
    let (key, value) = word.strip_prefix('"').unwrap_or(word).split_once('=')?;
    let same = |a: u8, b: u8| a == b || (a == b'-' && b == b'_') || (a == b'_' && b == b'-');
    if key.len() != name.len() || !key.bytes().zip(name.bytes()).all(|(a, b)| same(a, b)) {
        return None;
    }
    let value = value.strip_prefix('"').unwrap_or(value);
    Some(value.strip_suffix('"').unwrap_or(value))
}

/// `kstrtobool` (`lib/kstrtox.c`): the first letter decides, for `o` the second. `e` and `d` came with Linux 6.16;
/// on an older kernel they would change nothing.
fn kernel_bool(text: &str) -> Option<bool> {
    let mut letters = text.bytes().map(|letter| letter.to_ascii_lowercase());
    match (letters.next()?, letters.next()) {
        (b'y' | b't' | b'1' | b'e', _) | (b'o', Some(b'n')) => Some(true),
        (b'n' | b'f' | b'0' | b'd', _) | (b'o', Some(b'f')) => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn spellings_of_kstrtobool() {
        for text in ["1", "y", "Y", "yes", "on", "oN", "true", "T", "enabled", "1x"] {
            assert_eq!(kernel_bool(text), Some(true), "{text}");
        }
        for text in ["0", "n", "N", "no", "off", "OF", "false", "F", "disabled"] {
            assert_eq!(kernel_bool(text), Some(false), "{text}");
        }
        for text in ["", "o", "oh", "2", "-1", "x"] {
            assert_eq!(kernel_bool(text), None, "{text}");
        }
    }

    #[test]
    fn the_kernels_rules() {
        let init_on_free = |line| truth(line, "init_on_free");
        assert_eq!(init_on_free("quiet init_on_free=1\n"), Some(true));
        assert_eq!(init_on_free("init_on_free=1 ro init_on_free=off"), Some(false));
        assert_eq!(init_on_free("init_on_free=1 init_on_free=what"), Some(true));
        assert_eq!(init_on_free("init-on-free=on"), Some(true));
        assert_eq!(init_on_free("init_on_free=\"1\""), Some(true));
        assert_eq!(init_on_free("\"init_on_free=1\""), Some(true));
        assert_eq!(init_on_free("init_on_free"), None);
        assert_eq!(init_on_free("xinit_on_free=1 init_on_free_=1"), None);
        assert_eq!(init_on_free("dyndbg=\"file a init_on_free=1 +p\" quiet"), None);
        assert_eq!(init_on_free("quiet -- init_on_free=1"), None);
        assert_eq!(init_on_free("rdinit=/x --log init_on_free=1"), Some(true));
        assert_eq!(last("kasan=on kasan=off", "kasan"), Some("off"));
    }

    proptest! {
        #[test]
        fn never_panics(text in "((a=|a|--|\"| |=|1|\u{e9}){0,12})|\\PC*") {
            let _ = truth(&text, "a");
            let _ = last(&text, "a");
        }

        #[test]
        fn the_last_one_wins(values in proptest::collection::vec(any::<bool>(), 1..6)) {
            let line: String = values.iter().map(|value| format!("page_poison={} ", if *value { "on" } else { "off" })).collect();
            prop_assert_eq!(truth(&line, "page_poison"), values.last().copied());
        }
    }
}
