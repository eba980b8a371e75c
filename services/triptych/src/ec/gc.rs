//! `triptych ec gc`: removes leftovers, and objects that nobody wants any more.
//!
//! Objects to remove are listed with their reasons first and removed then; with `--dry-run` the list
//! is only printed. An object that is removed while it is needed is encoded again, so only time is lost.

use super::objects::{ConcurrentTasks, age, all, failed, line, note, progress};
use crate::args::OperatorEcArgs;
use crate::error::CliError;
use crate::units::{age_text, bytes_text, count, parse_age};
use clap::Args;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;
use triptych_core::limits::Limits;
use triptych_ec::store::{Leftovers, Listed, Tidy};
use triptych_ec::{Access, EcStore};

/// Objects whose heads are asked for at once.
const PAGE: usize = 256;
/// Objects removed at once.
const JOBS: usize = 8;

/// Flags of `triptych ec gc`.
#[derive(Args, Debug)]
pub struct GcArgs {
    /// Keep the objects of this encoder, and remove those of others; its fingerprint or the first digits of it;
    /// repeat for several
    #[arg(long, value_name = "DIGITS", value_parser = digits)]
    fingerprint: Vec<String>,
    /// Remove what was stored longer ago, as in 90s, 15m, 12h or 7d
    #[arg(long, value_name = "AGE", value_parser = parse_age)]
    older_than: Option<Duration>,
    /// Remove the oldest until all objects take no more MiB than this
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(0..=1 << 40))]
    to_mib: Option<u64>,
    /// Say what would be removed, and remove nothing
    #[arg(long)]
    dry_run: bool,
    /// The store.
    #[command(flatten)]
    ec: OperatorEcArgs,
}

fn digits(text: &str) -> Result<String, String> {
    let is_start = (8..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
    if is_start {
        Ok(text.to_ascii_lowercase())
    } else {
        Err("a fingerprint has 64 hex digits; the first 8 or more will do".into())
    }
}

/// Reason for a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reason {
    OtherEncoder,
    Old,
    Room,
}

/// Removes, or says what it would.
///
/// # Errors
/// [`CliError`] for a store that cannot list, and for a fingerprint that no object has.
pub async fn run(args: GcArgs) -> Result<(), CliError> {
    let (tidy, access) = match args.dry_run {
        true => (Tidy::Count, Access::ReadOnly),
        false => (Tidy::Remove, Access::Existing),
    };
    let store = args.ec.open(&Limits::default(), access).await?;
    // What is asked for must be possible before anything is removed.
    let Choice { chosen, n_ageless } = choose(&*store, &args).await?;
    let left = store.leftovers(tidy).await.map_err(|e| failed(&e))?;
    let bar = progress(chosen.len(), "removing");
    let mut sums: BTreeMap<Reason, (usize, u64)> = BTreeMap::new();
    let mut tasks = ConcurrentTasks::of(JOBS);
    for (reason, listed) in &chosen {
        let sum = sums.entry(*reason).or_default();
        *sum = (sum.0 + 1, sum.1 + listed.len);
        if !args.dry_run {
            let store = store.clone();
            let key = listed.key;
            let ended = tasks.start(async move { store.delete(&key).await }).await?;
            ended.transpose().map_err(|e| failed(&e))?;
        }
        bar.inc(1);
    }
    while let Some(ended) = tasks.end().await? {
        ended.map_err(|e| failed(&e))?;
    }
    bar.finish_and_clear();
    if n_ageless > 0 {
        note(
            &bar,
            &format!("{} objects have no known age, so --older-than does not remove them", count(n_ageless)),
        );
    }
    for text in report(&sums, &left, &args) {
        line(&bar, &text)?;
    }
    if args.dry_run {
        note(&bar, "nothing was removed: --dry-run");
    }
    Ok(())
}

/// The objects to remove.
#[derive(Default)]
struct Choice {
    /// Each with the first reason for it.
    chosen: Vec<(Reason, Listed)>,
    /// Objects that `--older-than` leaves, since their age is not known.
    n_ageless: usize,
}

/// Chooses the objects to remove. A store that keeps no times has none that is old.
async fn choose(store: &dyn EcStore, args: &GcArgs) -> Result<Choice, CliError> {
    if args.fingerprint.is_empty() && args.older_than.is_none() && args.to_mib.is_none() {
        return Ok(Choice::default());
    }
    let (mut chosen, mut kept) = by_encoder(store, all(store).await?, &args.fingerprint).await?;
    let mut n_ageless = 0;
    if let Some(limit) = args.older_than {
        n_ageless = kept.iter().filter(|listed| listed.stored.is_none()).count();
        if n_ageless > 0 && n_ageless == kept.len() {
            return Err(CliError::Failed(format!(
                "{} does not keep the times at which objects were stored, so --older-than cannot choose, and nothing was \
                 removed; --to-mib and --fingerprint can",
                store.describe()
            )));
        }
        let (old, young) =
            kept.into_iter().partition::<Vec<_>, _>(|l| age(l.stored).is_some_and(|age| age > limit));
        chosen.extend(old.into_iter().map(|listed| (Reason::Old, listed)));
        kept = young;
    }
    if let Some(mib) = args.to_mib {
        chosen.extend(over(kept, mib << 20).into_iter().map(|listed| (Reason::Room, listed)));
    }
    Ok(Choice { chosen, n_ageless })
}

/// Parts the objects of encoders that are not named from the others, and from those whose head does not read.
async fn by_encoder(
    store: &dyn EcStore,
    all: Vec<Listed>,
    named: &[String],
) -> Result<(Vec<(Reason, Listed)>, Vec<Listed>), CliError> {
    if named.is_empty() {
        return Ok((Vec::new(), all));
    }
    let mut others = Vec::new();
    let mut kept = Vec::new();
    let mut n_named = 0;
    for page in all.chunks(PAGE) {
        let keys: Vec<_> = page.iter().map(|listed| listed.key).collect();
        let heads = store.heads(&keys).await.map_err(|e| failed(&e))?;
        for (listed, head) in page.iter().zip(heads) {
            let fingerprint = head.map(|item| item.fingerprint.to_string());
            let is_named = fingerprint.as_ref().is_some_and(|f| named.iter().any(|n| f.starts_with(n)));
            n_named += usize::from(is_named);
            match fingerprint {
                Some(_) if !is_named => others.push((Reason::OtherEncoder, listed.clone())),
                _ => kept.push(listed.clone()),
            }
        }
    }
    // Of a fingerprint that was typed wrong everything would be another's.
    if n_named == 0 && !others.is_empty() {
        return Err(CliError::Failed(format!(
            "no object is of the encoder {}, so nothing was removed; `triptych ec ls` shows whose they are",
            named.join(" or ")
        )));
    }
    Ok((others, kept))
}

/// The oldest of what is too much. What has no time goes first.
fn over(mut kept: Vec<Listed>, limit: u64) -> Vec<Listed> {
    kept.sort_by_key(|listed| Reverse(listed.stored));
    let mut bytes = 0_u64;
    let n_fit = kept.iter().take_while(|listed| {
        bytes = bytes.saturating_add(listed.len);
        bytes <= limit
    });
    let n_fit = n_fit.count();
    kept.split_off(n_fit)
}

fn report(sums: &BTreeMap<Reason, (usize, u64)>, left: &Leftovers, args: &GcArgs) -> Vec<String> {
    let size = |bytes: u64| bytes_text(usize::try_from(bytes).unwrap_or(usize::MAX));
    let mut lines = Vec::new();
    for (reason, (n, bytes)) in sums {
        let why = match reason {
            Reason::OtherEncoder => "of other encoders".to_owned(),
            Reason::Old => format!("older than {}", age_text(args.older_than.unwrap_or_default())),
            Reason::Room => format!("the oldest, down to {} MiB", args.to_mib.unwrap_or_default()),
        };
        lines.push(format!("{:>9} objects {why}, {}", count(*n), size(*bytes)));
    }
    lines.push(format!("{:>9} in quarantine", count(left.quarantined)));
    lines.push(format!("{:>9} unfinished", count(left.unfinished)));
    let bytes = sums.values().map(|(_, bytes)| bytes).sum::<u64>() + left.bytes;
    lines.push(format!("{:>9} altogether", size(bytes)));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use crate::ec::EcCommand;
    use clap::Parser;
    use std::time::UNIX_EPOCH;
    use triptych_core::ContentKey;
    use triptych_ec::conformance::sample_output;
    use triptych_ec::object::encode;
    use triptych_ec::store::memory::MemoryStore;

    #[test]
    fn the_oldest_go_until_the_rest_fits_and_what_has_no_time_goes_first() {
        let listed = |n: u8, stored_s: Option<u64>| Listed {
            key: ContentKey::from_bytes([n; 32]),
            len: 10,
            stored: stored_s.map(|s| UNIX_EPOCH + Duration::from_secs(s)),
        };
        let all = vec![listed(1, Some(5)), listed(2, None), listed(3, Some(9)), listed(4, Some(1))];
        let gone = |limit| over(all.clone(), limit).iter().map(|l| l.key.as_bytes()[0]).collect::<Vec<_>>();
        assert!(gone(40).is_empty());
        assert_eq!(gone(39), [2]);
        assert_eq!(gone(20), [4, 2]);
        assert_eq!(gone(0), [3, 1, 4, 2]);
    }

    #[tokio::test]
    async fn where_no_age_is_known_old_objects_are_not_looked_for_in_silence() {
        let Command::Ec(args) = Cli::parse_from(["triptych", "ec", "gc", "--older-than", "1h"]).command
        else {
            panic!()
        };
        let EcCommand::Gc(args) = args.command else { panic!() };
        let store = MemoryStore::new(1 << 20, &Limits::default());
        assert!(choose(&store, &args).await.is_ok_and(|choice| choice.chosen.is_empty()), "nothing is there");
        for n in 1..=2 {
            let key = ContentKey::from_bytes([n; 32]);
            store.put_if_absent(&key, encode(&sample_output(key, 64))).await.unwrap();
        }
        let refused = choose(&store, &args).await.err().map(|e| e.to_string()).unwrap_or_default();
        assert!(refused.contains("does not keep the times") && refused.contains("--to-mib"), "{refused}");
        let by_size = GcArgs { to_mib: Some(0), older_than: None, ..args };
        assert_eq!(choose(&store, &by_size).await.unwrap().chosen.len(), 2);
    }
}
