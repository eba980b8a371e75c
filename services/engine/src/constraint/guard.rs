//! Failures of the grammar library as refusals of the request: its errors, and its panics.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use triptych_core::Failure;

/// Longest library message in a failure, in characters.
const MAX_MESSAGE: usize = 400;
/// Start of the library's message for a panic that it caught itself; a backtrace follows on further lines.
const PANIC: &str = "panic: ";

/// The result of `call`, or a refusal of `field` if the library panics. What `call` changed is not to be used again
/// after a panic.
pub(super) fn guarded<T>(
    field: &'static str,
    call: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(panicked(field, &text_of(&*panic))))
}

/// The library's refusal as an invalid-request failure; its text is put on one line.
pub(super) fn refused(field: &'static str, error: &impl fmt::Display) -> Failure {
    let text = error.to_string();
    if let Some(panic) = text.strip_prefix(PANIC) {
        return panicked(field, panic);
    }
    let line: Vec<&str> = text.split_whitespace().collect();
    let short: String = line.join(" ").chars().take(MAX_MESSAGE).collect();
    Failure::invalid(format!("{field} cannot be used: {short}")).with_param(field).with_detail(text)
}

fn panicked(field: &'static str, text: &str) -> Failure {
    Failure::invalid(format!("{field} cannot be used: the grammar library fails on it"))
        .with_param(field)
        .with_detail(text)
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_core::FailureClass;

    #[test]
    fn a_panic_is_a_refusal_that_shows_no_backtrace() {
        let own = guarded("regex", || -> Result<(), Failure> { panic!("at {}", "once") }).unwrap_err();
        assert_eq!(own.detail.as_deref(), Some("at once"));
        let caught = refused("regex", &"panic: at once\n<backtrace>\n0: main\n</backtrace>");
        for failure in [own, caught] {
            assert_eq!(failure.class, FailureClass::InvalidArgument);
            assert_eq!(failure.param.as_deref(), Some("regex"));
            assert!(!failure.message.contains("once") && !failure.message.contains("main"), "{failure}");
        }
    }
}
