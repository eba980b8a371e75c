//! The commit of this binary.

/// The commit that this binary was built from, if it is known; with a `+` if files differed from it.
pub fn commit() -> Option<String> {
    Some(env!("TRIPTYCH_COMMIT")).filter(|commit| !commit.is_empty()).map(str::to_owned)
}
