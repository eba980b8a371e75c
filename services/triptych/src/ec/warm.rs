//! `triptych ec warm`: copies objects that verify from one store to another.

use super::objects::{ConcurrentTasks, all, failed, find, line, note, progress};
use crate::args::EcArg;
use crate::args::tls::TlsArgs;
use crate::error::{CliError, chain};
use crate::units::{bytes_text, count};
use clap::Args;
use std::io::BufRead;
use std::sync::Arc;
use tokio::task::spawn_blocking;
use triptych_core::ContentKey;
use triptych_core::limits::Limits;
use triptych_ec::{Access, EcError, EcStore, OpenOptions, PutOutcome, Scope, object};
use triptych_runtime::Drain;

/// Keys looked for in the other store at once.
const PAGE: usize = 256;

/// Flags of `triptych ec warm`.
#[derive(Args, Debug)]
pub struct WarmArgs {
    /// Store to copy from, which must be there
    #[arg(long, value_name = "STORE")]
    from: EcArg,
    /// Store to copy to, which is made if it is not there
    #[arg(long, value_name = "STORE")]
    to: EcArg,
    /// Read the keys to copy from stdin, one a line, instead of copying everything
    #[arg(long)]
    stdin: bool,
    /// Number of objects to copy at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: u16,
    /// TLS towards store processes
    #[command(flatten)]
    tls: TlsArgs,
}

/// Outcome of an object.
enum Copied {
    Stored(u64),
    Already,
    Gone,
    Bad(String),
}

/// Number of objects by outcome.
#[derive(Default)]
struct Sums {
    stored: usize,
    bytes: u64,
    already: usize,
    gone: usize,
    bad: usize,
}

/// Copies.
///
/// # Errors
/// [`CliError`] if a store fails, and at the end if an object did not verify.
pub async fn run(args: WarmArgs) -> Result<(), CliError> {
    if args.from.setting == args.to.setting {
        return Err(CliError::Setting("--from and --to are the same store".into()));
    }
    let limits = Limits::default();
    let with = OpenOptions {
        limits: limits.clone(),
        dial: Some(args.tls.links(&Drain::new())?.dialer().as_fn()),
        ..OpenOptions::default()
    };
    let from = open(&args.from, "--from", &OpenOptions { access: Access::ReadOnly, ..with.clone() }).await?;
    let to = open(&args.to, "--to", &with).await?;
    let keys = if args.stdin {
        typed(&*from).await?
    } else {
        all(&*from).await?.into_iter().map(|listed| listed.key).collect()
    };
    let bar = progress(keys.len(), "copying");
    let mut tasks = ConcurrentTasks::of(args.jobs.into());
    let mut sums = Sums::default();
    for page in keys.chunks(PAGE) {
        let there = to.heads(page).await.map_err(|e| failed(&e))?;
        for (key, head) in page.iter().copied().zip(there) {
            if head.is_some() {
                sums.already += 1;
                bar.inc(1);
                continue;
            }
            let copying = copy(from.clone(), to.clone(), key, limits.clone());
            if let Some((key, copied)) = tasks.start(async move { (key, copying.await) }).await? {
                bar.inc(1);
                sums.add(key, copied.map_err(|e| failed(&e))?, |text| line(&bar, text))?;
            }
        }
    }
    while let Some((key, copied)) = tasks.end().await? {
        bar.inc(1);
        sums.add(key, copied.map_err(|e| failed(&e))?, |text| line(&bar, text))?;
    }
    bar.finish_and_clear();
    note(&bar, &sums.text());
    match sums.bad {
        0 => Ok(()),
        n => Err(CliError::Failed(format!("{n} objects do not verify and were not copied"))),
    }
}

impl Sums {
    fn add(
        &mut self,
        key: ContentKey,
        copied: Copied,
        say: impl Fn(&str) -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        match copied {
            Copied::Stored(len) => (self.stored, self.bytes) = (self.stored + 1, self.bytes + len),
            Copied::Already => self.already += 1,
            Copied::Gone => self.gone += 1,
            Copied::Bad(why) => {
                self.bad += 1;
                say(&format!("{key} {why}"))?;
            }
        }
        Ok(())
    }

    fn text(&self) -> String {
        format!(
            "{} copied, {}; {} were there, {} are not in the first store, {} do not verify",
            count(self.stored),
            bytes_text(usize::try_from(self.bytes).unwrap_or(usize::MAX)),
            count(self.already),
            count(self.gone),
            count(self.bad)
        )
    }
}

async fn open(arg: &EcArg, flag: &str, with: &OpenOptions) -> Result<Arc<dyn EcStore>, CliError> {
    if arg.setting.scope() == Scope::Process {
        return Err(CliError::Setting(format!(
            "{flag} memory would be this process's alone, and end with it"
        )));
    }
    let opened = triptych_ec::open_with(&arg.setting, with).await;
    opened.map_err(|e| CliError::Setting(format!("{flag}: {}", chain(&e))))
}

/// The keys on stdin, empty lines left out.
async fn typed(from: &dyn EcStore) -> Result<Vec<ContentKey>, CliError> {
    let read = spawn_blocking(|| std::io::stdin().lock().lines().collect::<Result<Vec<_>, _>>()).await;
    let lines = read
        .map_err(|e| CliError::failed("reading stdin ended early", &e))?
        .map_err(|e| CliError::failed("cannot read stdin", &e))?;
    let mut keys = Vec::new();
    for text in lines.iter().map(|text| text.trim()).filter(|text| !text.is_empty()) {
        keys.push(find(from, text).await?);
    }
    Ok(keys)
}

async fn copy(
    from: Arc<dyn EcStore>,
    to: Arc<dyn EcStore>,
    key: ContentKey,
    limits: Limits,
) -> Result<Copied, EcError> {
    let object = match from.get(&key).await {
        Ok(Some(object)) => object,
        Ok(None) => return Ok(Copied::Gone),
        Err(e @ EcError::Corrupt { .. }) => return Ok(Copied::Bad(chain(&e))),
        Err(e) => return Err(e),
    };
    let read = object.clone();
    let decoded = spawn_blocking(move || object::decode(read, &key, &limits).map(drop)).await;
    match decoded {
        Ok(Ok(())) => {}
        Ok(Err(e)) => return Ok(Copied::Bad(chain(&e))),
        Err(e) => return Ok(Copied::Bad(format!("verifying ended early: {e}"))),
    }
    let len = object.len() as u64;
    Ok(match to.put_if_absent(&key, object).await? {
        PutOutcome::Stored => Copied::Stored(len),
        PutOutcome::AlreadyThere => Copied::Already,
    })
}
