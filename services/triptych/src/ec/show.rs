//! `triptych ec show`: what one object is, by its head; or why it is none.

use super::ls::json;
use super::objects::{age, before, failed, find, line};
use crate::args::OperatorEcArgs;
use crate::error::{CliError, chain};
use crate::units::{age_text, bytes_text, count};
use clap::Args;
use indicatif::ProgressBar;
use std::fmt::Write as _;
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem, Extent};
use triptych_ec::store::Listed;
use triptych_ec::{Access, EcError, EcStore, object};

/// Flags of `triptych ec show`.
#[derive(Args, Debug)]
pub struct ShowArgs {
    /// Key of the object, or the first digits of it
    key: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// The store.
    #[command(flatten)]
    ec: OperatorEcArgs,
}

/// Prints it.
///
/// # Errors
/// [`CliError::Failed`] if there is none, or what is there has no readable head.
pub async fn run(args: ShowArgs) -> Result<(), CliError> {
    let limits = Limits::default();
    let store = args.ec.open(&limits, Access::ReadOnly).await?;
    let key = find(&*store, &args.key).await?;
    let object = match store.get(&key).await {
        Ok(Some(object)) => object,
        Ok(None) => return Err(CliError::Failed(format!("{} has no object {key}", store.describe()))),
        Err(e @ EcError::Corrupt { .. }) => return Err(CliError::Failed(format!("{key}: {}", chain(&e)))),
        Err(e) => return Err(failed(&e)),
    };
    let first_bytes = object.get(..object::MAX_HEAD_BYTES).unwrap_or(&object);
    let item = object::probe(first_bytes, object.len(), &key, &limits)
        .map_err(|e| CliError::Failed(format!("{key} has no readable head: {}", chain(&e))))?;
    let listed = listed(&*store, &key, object.len()).await;
    let text = if args.json { full_json(&listed, &item) } else { page(&listed, &item) };
    line(&ProgressBar::hidden(), text.trim_end())
}

/// The object, and the time it was stored, if the store knows.
async fn listed(store: &dyn EcStore, key: &ContentKey, len: usize) -> Listed {
    let unknown = Listed { key: *key, len: len as u64, stored: None };
    let page = store.list(before(&key.to_string()).as_ref(), 1).await;
    page.ok().and_then(|page| page.into_iter().find(|l| l.key == *key)).unwrap_or(unknown)
}

fn page(listed: &Listed, item: &EncodedItem) -> String {
    let mut page = String::new();
    let mut line = |name: &str, text: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(page, "{name:10} {text}");
    };
    line("key", item.key.to_string());
    line("size", bytes_text(usize::try_from(listed.len).unwrap_or(usize::MAX)));
    line(
        "stored",
        age(listed.stored).map_or_else(|| "the store does not know".into(), |a| age_text(a) + " ago"),
    );
    line("modality", item.modality.as_str().into());
    line("rows", format!("{} of {} {}", count(item.n_tokens as usize), item.hidden, item.dtype.as_str()));
    line("extent", extent(&item.extent));
    line("encoder", item.fingerprint.to_string());
    line("checksum", checksum(item));
    page
}

fn full_json(listed: &Listed, item: &EncodedItem) -> String {
    let mut value = json(listed, Some(item));
    value["extent"] = extent(&item.extent).into();
    value["checksum"] = checksum(item).into();
    format!("{value:#}")
}

fn extent(extent: &Extent) -> String {
    match extent {
        Extent::Grid { t, h, w } => format!("a grid of {t} x {h} x {w} patches"),
        Extent::Windows { n_windows, duration_ms, .. } => {
            format!("{n_windows} windows of {:.3} s of audio", *duration_ms as f64 / 1000.0)
        }
        Extent::Tokens => "text".into(),
        Extent::Video { t, h, w, interval, .. } => {
            format!("a video of {t} x {h} x {w} patches, {:.3} s apart", interval.get())
        }
    }
}

fn checksum(item: &EncodedItem) -> String {
    blake3::Hash::from_bytes(item.checksum).to_string()
}
