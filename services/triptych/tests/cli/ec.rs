//! `triptych ec` over real stores: a directory, and a slab to copy into.

use super::{refuses, triptych};
use serde_json::Value;
use std::fs;
use std::future::Future;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};
use tempfile::TempDir;
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem, EncoderOutput, Fingerprint};
use triptych_ec::conformance::sample_output;
use triptych_ec::object::encode;
use triptych_ec::store::disk::DiskStore;
use triptych_ec::{EcSetting, EcStore, open};

fn key(n: u8) -> ContentKey {
    ContentKey::from_bytes([n; 32])
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.expect("a runtime starts").block_on(work)
}

/// A directory with an object of each key, 1000 rows of 16 bytes, and its setting.
struct Objects {
    dir: TempDir,
    setting: String,
}

impl Objects {
    fn of(keys: &[u8]) -> Self {
        let dir = TempDir::new().expect("a temporary directory");
        let setting = format!("disk:{}", dir.path().display());
        let objects = Self { dir, setting };
        keys.iter().for_each(|n| objects.put(&sample_output(key(*n), 16_000)));
        objects
    }

    fn put(&self, output: &EncoderOutput) {
        block_on(async {
            self.store().await.put_if_absent(&output.item().key, encode(output)).await.expect("stored");
        });
    }

    async fn store(&self) -> DiskStore {
        DiskStore::open(self.dir.path(), &Limits::default()).await.expect("a usable directory")
    }

    fn path(&self, n: u8) -> std::path::PathBuf {
        block_on(async { self.store().await.path_of(&key(n)) })
    }

    /// Flips a bit of the rows.
    fn spoil(&self, n: u8) {
        let mut bytes = fs::read(self.path(n)).expect("the object");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(self.path(n), bytes).expect("written");
    }

    /// The first byte of each key that is there.
    fn left(&self) -> Vec<u8> {
        let listed = block_on(async { self.store().await.list(None, 100).await.expect("a list") });
        listed.iter().map(|l| l.key.as_bytes()[0]).collect()
    }
}

/// Succeeds, and gives what it wrote on stdout.
#[track_caller]
fn says(args: &[&str]) -> String {
    let output = triptych(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_list_has_a_line_for_each_object_and_is_read_by_people_and_programs() {
    let objects = Objects::of(&[0xcd, 0xab]);
    fs::write(objects.path(0xab).with_file_name(format!("{}.safetensors", "ab1".repeat(21) + "0")), b"noise")
        .expect("written");
    let table = says(&["ec", "ls", "--ec", &objects.setting]);
    let lines: Vec<_> = table.lines().collect();
    assert!(lines[0].starts_with("KEY ") && lines.len() == 4, "{table}");
    assert!(lines[1].contains("(no readable head)"), "{table}");
    for part in ["abababababab ", " image ", " 1 000 ", " F32", "kB"] {
        assert!(lines[2].contains(part), "{part:?} is not in {table}");
    }
    assert!(!table.contains(&"ab".repeat(7)));
    assert!(says(&["ec", "ls", "--long", "--ec", &objects.setting]).contains(&"cd".repeat(32)));
    let json = says(&["ec", "ls", "--json", "--limit", "2", "--ec", &objects.setting]);
    let all: Vec<Value> = json.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    assert_eq!((all.len(), &all[0]["readable"], &all[1]["rows"]), (2, &false.into(), &1000.into()));
    assert!(says(&["ec", "ls", "--json", "--ec", &Objects::of(&[]).setting]).is_empty());
}

#[test]
fn one_object_is_shown_by_the_first_digits_of_its_key() {
    let objects = Objects::of(&[0xab, 0xcd]);
    let page = says(&["ec", "show", "ABAB", "--ec", &objects.setting]);
    for part in [&"ab".repeat(32), "1 000 of 4 F32", "a grid of 1 x 1 x 1000 patches", "checksum", "0s ago"] {
        assert!(page.contains(part), "{part:?} is not in {page}");
    }
    let json = says(&["ec", "show", &"cd".repeat(32), "--json", "--ec", &objects.setting]);
    let value: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!((&value["hidden"], &value["readable"]), (&4.into(), &true.into()));
    let with = |key: &'static str| ["ec", "show", key, "--ec", &objects.setting];
    refuses(&with("ef00"), 1, &["no object's key begins with ef00"]);
    refuses(&with("ab"), 2, &["64 hex digits"]);
    refuses(&with("what"), 2, &["64 hex digits"]);
    fs::write(objects.path(0xab), b"noise").expect("written");
    refuses(&with("abab"), 1, &["no readable head"]);
    // The same first digits, and other ones after them.
    let mut bytes = [0xcd; 32];
    bytes[31] = 0;
    objects.put(&sample_output(ContentKey::from_bytes(bytes), 64));
    refuses(&with("cdcdcd"), 1, &["several keys"]);
}

#[test]
fn a_bad_object_is_named_fails_the_command_and_is_taken_out_on_demand() {
    let objects = Objects::of(&[1, 2, 3]);
    says(&["ec", "verify", "--ec", &objects.setting]);
    objects.spoil(2);
    let verify = |more: &[&str]| triptych(&[&["ec", "verify", "--ec", &objects.setting], more].concat());
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let output = verify(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).starts_with(&"02".repeat(32)), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("2 good, 1 bad"), "{}", text(&output.stderr));
    assert!(verify(&["0101", "0303"]).status.success(), "only what is named is read");
    assert_eq!(verify(&["--quarantine", "--jobs", "1"]).status.code(), Some(1));
    assert!(verify(&[]).status.success());
    assert_eq!(objects.left(), [1, 3]);
    assert_eq!(verify(&[&"02".repeat(32)]).status.code(), Some(1), "it was named and is not there");
}

#[test]
fn what_is_not_wanted_is_told_first_and_then_removed() {
    let objects = Objects::of(&[1, 2, 3, 4]);
    let other = sample_output(key(5), 16_000);
    let item = EncodedItem { fingerprint: Fingerprint::from_bytes([0xee; 32]), ..other.item().clone() };
    objects.put(&EncoderOutput::seal(item, other.rows().clone()).expect("the same rows"));
    let old = SystemTime::now() - Duration::from_secs(3 * 86_400);
    fs::File::open(objects.path(1)).and_then(|f| f.set_modified(old)).expect("an older file");
    objects.spoil(4);
    assert_eq!(triptych(&["ec", "verify", "--quarantine", "--ec", &objects.setting]).status.code(), Some(1));

    let gc = |more: &[&str]| says(&[&["ec", "gc", "--ec", &objects.setting], more].concat());
    let told = gc(&["--dry-run", "--older-than", "2d", "--to-mib", "0"]);
    assert!(told.contains("1 objects older than 2d") && told.contains("3 objects the oldest"), "{told}");
    assert!(told.contains("1 in quarantine"), "{told}");
    assert_eq!(objects.left(), [1, 2, 3, 5]);
    assert!(gc(&["--older-than", "2d"]).contains("1 in quarantine"));
    assert_eq!(objects.left(), [2, 3, 5]);
    assert!(gc(&[]).contains("0 in quarantine"), "the last run emptied it");
    refuses(
        &["ec", "gc", "--ec", &objects.setting, "--fingerprint", "0123456789"],
        1,
        &["no object is of the encoder 0123456789", "nothing was removed"],
    );
    assert!(gc(&["--fingerprint", "eeeeeeee"]).contains("2 objects of other encoders"));
    assert_eq!(objects.left(), [5]);
    gc(&["--to-mib", "0"]);
    assert!(objects.left().is_empty());
    refuses(&["ec", "gc", "--ec", &objects.setting, "--older-than", "soon"], 2, &["7d"]);
    refuses(&["ec", "gc", "--ec", &objects.setting, "--fingerprint", "ee"], 2, &["first 8"]);
}

#[test]
fn a_slab_is_filled_from_a_directory_with_what_verifies() {
    let objects = Objects::of(&[1, 2, 3]);
    objects.spoil(3);
    let slab = objects.dir.path().join("slab");
    let to = format!("shm:{}?mib=4", slab.display());
    let copies = |args: &[&str], stdin: &str| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_triptych"))
            .args(["ec", "warm", "--from", &objects.setting, "--to", &to])
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        // A child that does not read it may have ended.
        let _ = child.stdin.take().expect("piped").write_all(stdin.as_bytes());
        let output = child.wait_with_output().expect("it ends");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, text) = copies(&["--stdin"], &format!("0101\n\n{}\n", "07".repeat(32)));
    assert!(
        code == Some(0) && text.contains("1 copied") && text.contains("1 are not in the first"),
        "{text}"
    );
    let (code, text) = copies(&[], "");
    assert!(code == Some(1) && text.contains("1 copied") && text.contains("1 were there"), "{text}");
    assert!(text.contains("1 objects do not verify"), "{text}");
    block_on(async {
        let setting: EcSetting = to.parse().expect("a setting");
        let store = open(&setting, &Limits::default()).await.expect("the slab");
        let object = store.get(&key(2)).await.expect("an answer");
        assert_eq!(object, Some(encode(&sample_output(key(2), 16_000))));
        assert_eq!(store.get(&key(3)).await.expect("an answer"), None);
    });
    says(&["ec", "verify", "--ec", &to]);
    assert_eq!(says(&["ec", "ls", "--ec", &to]).lines().count(), 3);
}

#[test]
fn a_look_at_a_store_that_is_not_there_says_so_and_makes_none() {
    let dir = TempDir::new().expect("a temporary directory");
    let (typo, slab) = (dir.path().join("typo"), dir.path().join("slab"));
    for (path, setting) in
        [(&typo, format!("disk:{}", typo.display())), (&slab, format!("shm:{}", slab.display()))]
    {
        let place = path.to_str().expect("plain");
        let looks: [&[&str]; 5] =
            [&["ls"], &["show", "abcd"], &["verify"], &["gc", "--dry-run"], &["gc", "--older-than", "1h"]];
        for look in looks {
            refuses(
                &[&["ec"], look, &["--ec", &setting]].concat(),
                2,
                &["there is no", place, "--ec names another"],
            );
        }
        refuses(&["ec", "warm", "--from", &setting, "--to", "disk:x"], 2, &["--from", "there is no", place]);
        assert!(!path.exists(), "{place}");
    }
    assert!(fs::read_dir(dir.path()).expect("the folder").next().is_none(), "nothing beside it either");
}

#[test]
fn each_command_has_examples() {
    for command in ["ls", "show", "verify", "gc", "warm"] {
        let help = says(&["ec", command, "--help"]);
        assert!(help.contains("Examples:\n  triptych ec "), "{help}");
        let (options, tls) = help.split_once("TLS between the parts:").expect("its flags");
        assert!(options.contains("--ec ") || options.contains("--from "), "{help}");
        let stray = ["--json", "--limit", "--jobs", "--dry-run", "--quarantine", "--stdin"];
        assert!(
            !stray.iter().any(|flag| tls.contains(&format!("{flag} ")) && !options.contains(flag)),
            "{help}"
        );
    }
}

#[test]
fn stores_that_make_no_sense_here_are_refused_with_a_reason() {
    refuses(&["ec", "ls", "--ec", "memory"], 2, &["this process's alone"]);
    refuses(&["ec", "warm", "--from", "disk:a", "--to", "disk:a"], 2, &["the same store"]);
    refuses(&["ec", "warm", "--from", "memory", "--to", "shm"], 2, &["--from memory"]);
    refuses(&["ec", "ls", "--ec", "redis://127.0.0.1:9"], 1, &["redis store: list failed"]);
}
