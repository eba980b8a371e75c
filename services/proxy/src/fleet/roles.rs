//! The setting of elastic roles: who encodes, where PD workers hold encoders too. The choice itself is in
//! [`super::elastic`].

use std::fmt;
use std::str::FromStr;

/// Division of encodes among workers with the encoders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Roles {
    /// Each encode goes to the worker of either kind that is predicted to be done first.
    Auto,
    /// Encoder workers encode; PD workers with encoders do for their own requests where there are no encoder workers, and
    /// as a last resort.
    #[default]
    Fixed,
}

impl Roles {
    /// Every value.
    pub const ALL: [Self; 2] = [Self::Auto, Self::Fixed];

    /// The word of the flag.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Fixed => "fixed",
        }
    }
}

impl fmt::Display for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A text that is no value of [`Roles`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not auto or fixed")]
pub struct NotRoles(String);

impl FromStr for Roles {
    type Err = NotRoles;

    fn from_str(text: &str) -> Result<Self, NotRoles> {
        let found = Self::ALL.into_iter().find(|roles| roles.as_str() == text);
        found.ok_or_else(|| NotRoles(text.to_owned()))
    }
}
