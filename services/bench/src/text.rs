//! Settings written as text: `NAME[:key=value,…]`, times with units. Every mistake names what was found and what is
//! allowed.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

/// A setting that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The name is none of those known.
    #[error("{what} {found:?} is not known; there are {allowed}")]
    Name {
        /// Kind of setting.
        what: &'static str,
        /// Name that was given.
        found: String,
        /// The names there are.
        allowed: String,
    },
    /// A key is none of those that the name takes.
    #[error("{of} has no setting {found:?}; it has {allowed}")]
    Key {
        /// Name whose keys these are.
        of: String,
        /// The key.
        found: String,
        /// The keys there are.
        allowed: String,
    },
    /// A value cannot be read, or is out of range.
    #[error("{key}={found:?}: {allowed}")]
    Value {
        /// Its key.
        key: String,
        /// The value.
        found: String,
        /// Allowed values.
        allowed: String,
    },
    /// A trace file cannot be read, or has bad rows.
    #[error("trace {file}: {reason}")]
    Trace {
        /// The file.
        file: String,
        /// Every bad row by its line, or why the file could not be read.
        reason: String,
    },
}

/// The keys and values after a name, taken one after the other; what is left at the end is a mistake.
#[derive(Clone, Debug)]
pub struct Settings {
    of: String,
    left: BTreeMap<String, String>,
    known: Vec<&'static str>,
}

impl Settings {
    /// Splits `NAME[:key=value,…]`.
    ///
    /// # Errors
    /// A part without `=`, or a key given twice.
    pub fn parse(text: &str) -> Result<(String, Self), TextError> {
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        let mut left = BTreeMap::new();
        for part in rest.split(',').filter(|p| !p.trim().is_empty()) {
            let (key, value) = part.split_once('=').ok_or_else(|| bad(name, part, "is written key=value"))?;
            let key = key.trim().to_owned();
            let value = value.trim().to_owned();
            if let Some(first) = left.insert(key.clone(), value) {
                return Err(bad(&key, &first, "is given twice"));
            }
        }
        let name = name.trim().to_owned();
        Ok((name.clone(), Self { of: name, left, known: Vec::new() }))
    }

    /// The text of a key, if it is there.
    pub fn take(&mut self, key: &'static str) -> Option<String> {
        self.known.push(key);
        self.left.remove(key)
    }

    /// The text of a key that has to be there.
    ///
    /// # Errors
    /// It is not, or it is empty.
    pub fn required(&mut self, key: &'static str, allowed: &str) -> Result<String, TextError> {
        let given = self.take(key).filter(|text| !text.is_empty());
        given.ok_or_else(|| bad(key, "", allowed))
    }

    /// A number of a key within bounds, both included.
    ///
    /// # Errors
    /// No number, or one outside.
    pub fn number<T>(&mut self, key: &'static str, default: T, bounds: (T, T)) -> Result<T, TextError>
    where
        T: FromStr + PartialOrd + std::fmt::Display,
    {
        let Some(text) = self.take(key) else { return Ok(default) };
        let value = text.parse::<T>().ok().filter(|v| *v >= bounds.0 && *v <= bounds.1);
        value.ok_or_else(|| bad(key, &text, &format!("is a number from {} to {}", bounds.0, bounds.1)))
    }

    /// A time of a key.
    ///
    /// # Errors
    /// No time.
    pub fn time(&mut self, key: &'static str) -> Result<Option<Duration>, TextError> {
        self.take(key).map(|text| duration(key, &text)).transpose()
    }

    /// Nothing may be left.
    ///
    /// # Errors
    /// Names the first key that nobody took.
    pub fn end(mut self) -> Result<(), TextError> {
        self.known.sort_unstable();
        match self.left.into_keys().next() {
            None => Ok(()),
            Some(found) => Err(TextError::Key { of: self.of, found, allowed: self.known.join(", ") }),
        }
    }
}

/// A value that is not allowed.
pub fn bad(key: &str, found: &str, allowed: &str) -> TextError {
    TextError::Value { key: key.to_owned(), found: found.to_owned(), allowed: allowed.to_owned() }
}

/// A time with its unit: `us`, `ms`, `s`, `m` or `h`, at most a year.
///
/// # Errors
/// No number, no unit, or too long.
pub fn duration(key: &str, text: &str) -> Result<Duration, TextError> {
    let allowed = "is a time such as 500us, 200ms, 1.5s, 10m or 1h";
    let unit_at = text.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(|| bad(key, text, allowed))?;
    let (number, unit) = text.split_at(unit_at);
    let scale = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(bad(key, text, allowed)),
    };
    let seconds = number.trim().parse::<f64>().ok().map(|n| n * scale);
    let seconds = seconds.filter(|s| (0.0..=366.0 * 86400.0).contains(s));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| bad(key, text, allowed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_time_has_a_unit_and_a_bound() {
        let check = |text: &str, expect: Option<f64>| {
            assert_eq!(duration("t", text).ok().map(|d| d.as_secs_f64()), expect, "{text}");
        };
        check("500ms", Some(0.5));
        check("1.5s", Some(1.5));
        check("250us", Some(0.00025));
        check("2m", Some(120.0));
        check("1h", Some(3600.0));
        for wrong in ["", "5", "ms", "-1s", "nans", "1e99h", "1 week", "infs"] {
            check(wrong, None);
        }
    }

    #[test]
    fn what_nobody_takes_is_named_with_what_there_is() {
        let (name, mut settings) = Settings::parse("gamma:cv=2,vc=3").expect("two settings");
        assert_eq!((name.as_str(), settings.number("cv", 1.0, (0.0, 9.0))), ("gamma", Ok(2.0)));
        let text = settings.end().expect_err("vc is unknown").to_string();
        assert_eq!(text, "gamma has no setting \"vc\"; it has cv");
    }

    #[test]
    fn a_key_given_twice_is_a_mistake() {
        assert!(Settings::parse("text:a=1,a=2").is_err());
        assert!(Settings::parse("text:a").is_err());
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "\\PC{0,40}") {
            let _ = Settings::parse(&text).map(|(_, s)| s.end());
            let _ = duration("t", &text);
        }
    }
}
