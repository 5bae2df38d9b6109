//! The text part of the guest shell's messages: one line each, so line breaks are escaped. Used at both ends of the port.

/// Makes `text` fit on a line.
#[must_use]
pub fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('\n', "\\n")
}

/// Undoes [`escape`].
#[must_use]
pub fn unescape(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(c) = characters.next() {
        match c {
            '\\' => plain.push(if characters.next() == Some('n') { '\n' } else { '\\' }),
            c => plain.push(c),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_survives_escaping() {
        for text in ["", "plain", "a\nb", "\\n", "\\\\\n\\", "ends with \\"] {
            assert_eq!(unescape(&escape(text)), text);
            assert!(!escape(text).contains('\n'));
        }
    }
}
