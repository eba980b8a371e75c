//! Roles where PD workers hold encoders too: the setting, and the role of one worker. The choices are in
//! [`super::elastic`].

use std::fmt;
use std::str::FromStr;

/// Division of encodes among workers with the encoders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Roles {
    /// Workers with both halves divide encodes and requests among them by the work there is; a busy encoder worker spills to them.
    #[default]
    Auto,
    /// Encoder workers encode; PD workers with encoders do for their own requests where there are no encoder workers, and
    /// as a last resort.
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

/// Work that a PD worker with encoders is given. A change moves nothing: requests end where they run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ElasticRole {
    /// Encodes and requests.
    #[default]
    Both,
    /// Encodes; requests only if no other worker is able.
    Encoder,
    /// Requests; encodes that others would end much later.
    Pd,
}

impl ElasticRole {
    /// Every value.
    pub const ALL: [Self; 3] = [Self::Both, Self::Encoder, Self::Pd];

    /// The word of the admin API.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Encoder => "encoder",
            Self::Pd => "pd",
        }
    }
}

/// A text that is no value of [`ElasticRole`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no role; allowed are both, encoder and pd")]
pub struct NotAnElasticRole(String);

impl FromStr for ElasticRole {
    type Err = NotAnElasticRole;

    fn from_str(text: &str) -> Result<Self, NotAnElasticRole> {
        let found = Self::ALL.into_iter().find(|role| role.as_str() == text);
        found.ok_or_else(|| NotAnElasticRole(text.to_owned()))
    }
}
