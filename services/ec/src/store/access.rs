//! Use for which a store is opened.

/// Use for which a store is opened: that of a part of a cluster makes it, that of an operator does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Reads and writes; a slab or a directory that is not there is made.
    #[default]
    Create,
    /// Reads and writes; a slab or a directory that is not there is [`crate::EcError::NoStore`].
    Existing,
    /// As [`Self::Existing`], and nothing of it changes: neither files nor uses, which decide about evictions.
    ReadOnly,
}
