//! A container without a container runtime: the files of the image on an empty root, its own mounts, a user without a
//! name, a read-only root, and no new privileges.

use crate::authority::root_pem;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use tempfile::TempDir;
use triptych_tests::tools::root;

/// Folders of the image, and those that every runtime adds.
const FOLDERS: [&str; 8] = ["etc/ssl/certs", "tmp", "models", "ec", "var/lib/triptych", "proc", "dev", "tls"];
/// The search path, which is Docker's default.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Arguments: the root, the user, the binary; then source, target and `ro` or `rw` of each mount; `--`; the command.
const ENTER: &str = r#"
set -eu
root=$1 user=$2 binary=$3
shift 3
mount --bind "$root" "$root"
mount --bind "$binary" "$root/triptych"
mount -t proc proc "$root/proc"
for device in null random urandom; do
    mount --bind "/dev/$device" "$root/dev/$device"
done
mount -t tmpfs -o mode=1777,size=64m tmpfs "$root/tmp"
while [ "$1" != -- ]; do
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    mount -o "remount,bind,$3" "$root$2"
    shift 3
done
shift
mount -o remount,bind,ro "$root"
exec setpriv --no-new-privs chroot --userspec="$user" "$root" "$@"
"#;

/// A bind mount of the host.
#[derive(Clone, Debug)]
pub struct Mount {
    /// Path on the host.
    pub source: PathBuf,
    /// Path in the container.
    pub target: String,
    /// `ro` or `rw`.
    pub mode: &'static str,
}

/// A container in which commands can run. Drop removes its root.
pub struct Container {
    dir: TempDir,
    /// Network namespace; `None`: the host's.
    pub namespace: Option<String>,
    pub user: String,
    pub mounts: Vec<Mount>,
    pub variables: Vec<(String, String)>,
}

/// The static binary that `cargo xtask test` builds.
pub fn static_binary() -> PathBuf {
    let path = std::env::var_os("TRIPTYCH_STATIC_BIN").map(PathBuf::from);
    let path = path.unwrap_or_else(|| root().join("target/static/triptych"));
    assert!(path.is_file(), "{} is missing: run `cargo xtask static`", path.display());
    path
}

impl Container {
    /// An empty root with the binary, the Dockerfile's variables, and a name server.
    pub fn new(name_server: &str) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        // The container's user has to read it.
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("own folder");
        for folder in FOLDERS {
            fs::create_dir_all(dir.path().join(folder)).expect("own folder");
        }
        let file = |name: &str, text: &str| fs::write(dir.path().join(name), text).expect("own folder");
        // Targets of mounts.
        for name in ["triptych", "dev/null", "dev/random", "dev/urandom"] {
            file(name, "");
        }
        // As in Kubernetes: search domains are tried first.
        file(
            "etc/resolv.conf",
            &format!("nameserver {name_server}\nsearch svc.in.dns in.dns\noptions ndots:5\n"),
        );
        // Clients of stores do not start without root certificates, even for plain HTTP.
        file("etc/ssl/certs/ca-certificates.crt", &root_pem());
        file("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n");
        let user = "65532:65532".to_owned();
        Self { dir, namespace: None, user, mounts: Vec::new(), variables: image_variables() }
    }

    /// Writes a file of its root, as the runtime or the image would.
    pub fn put(&self, name: &str, text: &str) {
        fs::write(self.dir.path().join(name), text).expect("own folder");
    }

    /// A command that runs in the container.
    pub fn command(&self, words: &[String]) -> Command {
        let mut command = match &self.namespace {
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]);
                command
            }
            None => {
                let mut command = Command::new("unshare");
                command.arg("--mount");
                command
            }
        };
        command.args(["sh", "-c", ENTER, "enter"]).arg(self.dir.path()).arg(&self.user).arg(static_binary());
        for mount in &self.mounts {
            command.arg(&mount.source).arg(&mount.target).arg(mount.mode);
        }
        command.arg("--").args(words);
        command.env_clear().env("PATH", PATH).envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// The product's binary with arguments, in the container.
    pub fn triptych(&self, args: &[&str]) -> Command {
        let words: Vec<String> = ["/triptych"].iter().chain(args).map(|&word| word.to_owned()).collect();
        self.command(&words)
    }
}

/// Variables of `ENV` in the Dockerfile's last stage.
pub fn image_variables() -> Vec<(String, String)> {
    let text = fs::read_to_string(root().join("deploy/Dockerfile")).expect("a Dockerfile");
    let last = text.rsplit("\nFROM ").next().expect("a stage").replace("\\\n", " ");
    let set = last.lines().filter_map(|line| line.strip_prefix("ENV "));
    let pairs = set.flat_map(str::split_whitespace).filter_map(|pair| pair.split_once('='));
    let pairs: Vec<_> = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    assert!(pairs.iter().any(|(name, _)| name == "SSL_CERT_FILE"), "no variables found in {last}");
    pairs
}
