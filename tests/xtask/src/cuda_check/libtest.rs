//! Reads the output of a test binary: numbers, and names of tests that failed or left themselves out.

/// Opens the panic of a test that only the stand-in can run, as `kernels/tests/standin` has it.
const LEFT_OUT: &str = "left out on a device";

/// Tests of a binary, as far as it came.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tests {
    /// Tests that passed.
    pub n_passed: usize,
    /// Names of tests that failed, each with the first line of its panic's message.
    pub failed: Vec<(String, String)>,
    /// Names of tests that need the stand-in, and did not run.
    pub left_out: Vec<String>,
    /// True if the binary came to its end.
    pub is_whole: bool,
}

/// Reads what libtest prints.
pub fn parse(text: &str) -> Tests {
    let mut tests = Tests { is_whole: text.contains("\ntest result: "), ..Tests::default() };
    let mut names = Vec::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("test ")) {
        match line.rsplit_once(" ... ") {
            Some((_, "ok")) => tests.n_passed += 1,
            Some((name, "FAILED")) => names.push(name.to_owned()),
            _ => {}
        }
    }
    let n_failed =
        text.split_once("\ntest result: FAILED. ").and_then(|(_, rest)| number_before(rest, " failed;"));
    if n_failed.is_some_and(|n| n != names.len()) {
        tests.failed.push(("a test".to_owned(), "its line is not whole, see the log".to_owned()));
    }
    for name in names {
        let message = message(text, &name);
        match message.starts_with(LEFT_OUT) {
            true => tests.left_out.push(name),
            false => tests.failed.push((name, message)),
        }
    }
    tests
}

/// The number before the first of some words.
fn number_before(text: &str, words: &str) -> Option<usize> {
    text.split_once(words)?.0.rsplit(' ').next()?.parse().ok()
}

/// The first line of the message of a test's panic: it is printed at once, in the thread of the test.
fn message(text: &str, name: &str) -> String {
    let thread = format!("thread '{name}' ");
    let mut lines =
        text.lines().skip_while(|line| !line.starts_with(&thread) || !line.contains("panicked at "));
    lines.nth(1).unwrap_or("").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "running 4 tests\n\
        test a::fits ... ok\n\
        test b ... FAILED\n\
        ========= a line of a tool\n\
        test c ... FAILED\n\
        test d ... ignored\n\
        \nfailures:\n\n\
        ---- b stdout ----\n\
        a note\n\
        \nthread 'b' (71) panicked at kernels/tests/x.rs:3:5:\n\
        value 3 is 1, not 2\n\
        note: run with `RUST_BACKTRACE=1`\n\
        \n---- c stdout ----\n\
        \nthread 'c' panicked at kernels/tests/standin/src/lib.rs:98:48:\n\
        left out on a device, only the stand-in can count calls\n\
        \n\nfailures:\n    b\n    c\n\
        \ntest result: FAILED. 1 passed; 2 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.10s\n";

    #[test]
    fn tests_that_left_themselves_out_are_neither_passed_nor_failed() {
        let expect = Tests {
            n_passed: 1,
            failed: vec![("b".to_owned(), "value 3 is 1, not 2".to_owned())],
            left_out: vec!["c".to_owned()],
            is_whole: true,
        };
        assert_eq!(parse(OUTPUT), expect);
    }

    #[test]
    fn a_failure_whose_line_is_lost_is_a_failure() {
        let lost = parse(&OUTPUT.replace("test b ... FAILED\n", ""));
        assert_eq!((lost.failed.len(), lost.left_out.len()), (1, 1));
    }

    #[test]
    fn a_binary_that_was_ended_has_passed_what_it_printed() {
        let cut = parse("running 9 tests\ntest a ... ok\ntest b ... ok\n");
        assert_eq!(cut, Tests { n_passed: 2, ..Tests::default() });
    }
}
