//! Splits a list of settings at white space, except inside the path of a directory.

/// The settings of a list. A word that starts no setting belongs to the path before it.
pub(super) fn split(list: &str) -> Vec<&str> {
    let mut settings: Vec<&str> = Vec::new();
    for word in list.split_whitespace() {
        // Both are slices of the list, so what lies between them is kept as it was written.
        match settings.last_mut() {
            Some(path) if is_path(path) && !begins_setting(word) => {
                let start = path.as_ptr().addr() - list.as_ptr().addr();
                let end = word.as_ptr().addr() - list.as_ptr().addr() + word.len();
                *path = list.get(start..end).unwrap_or(word);
            }
            _ => settings.push(word),
        }
    }
    settings
}

fn is_path(setting: &str) -> bool {
    setting.starts_with("disk:") || setting.starts_with("shm:")
}

/// A scheme and a colon, or a name that stands alone.
fn begins_setting(word: &str) -> bool {
    let is_scheme = |s: &str| {
        s.starts_with(|c: char| c.is_ascii_lowercase())
            && s.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '+')
    };
    matches!(word.split('?').next(), Some("memory" | "shm"))
        || word.split_once(':').is_some_and(|(s, _)| is_scheme(s))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn white_space_separates_settings_but_not_parts_of_paths() {
        let cases: [(&str, &[&str]); 7] = [
            ("", &[]),
            (" memory\n redis://h ", &["memory", "redis://h"]),
            ("disk:/a b  c memory", &["disk:/a b  c", "memory"]),
            ("disk:/a Caf\u{e9}: x", &["disk:/a Caf\u{e9}: x"]),
            ("memory b", &["memory", "b"]),
            ("shm:/a b disk:c", &["shm:/a b", "disk:c"]),
            ("disk:/a b shm?mib=3", &["disk:/a b", "shm?mib=3"]),
        ];
        for (list, expect) in cases {
            assert_eq!(split(list), expect, "{list:?}");
        }
    }
}
