//! `triptych ec ls`: a table of the objects, or a JSON object for each.

use super::objects::{Pages, SHORT_DIGITS, age, failed, line, note};
use crate::args::OperatorEcArgs;
use crate::error::CliError;
use crate::units::{age_text, bytes_text, count};
use clap::Args;
use indicatif::ProgressBar;
use serde_json::{Value, json};
use std::time::UNIX_EPOCH;
use triptych_core::EncodedItem;
use triptych_core::limits::Limits;
use triptych_ec::Access;
use triptych_ec::store::Listed;

/// Flags of `triptych ec ls`.
#[derive(Args, Debug)]
pub struct LsArgs {
    /// Print a JSON object a line, with everything in it
    #[arg(long)]
    json: bool,
    /// Print keys and encoders whole
    #[arg(long)]
    long: bool,
    /// End after so many objects
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// The store.
    #[command(flatten)]
    ec: OperatorEcArgs,
}

/// Prints them in the order of their keys.
///
/// # Errors
/// [`CliError`] for a store that cannot be opened or cannot list.
pub async fn run(args: LsArgs) -> Result<(), CliError> {
    let store = args.ec.open(&Limits::default(), Access::ReadOnly).await?;
    let hidden = ProgressBar::hidden();
    let width = if args.long { 64 } else { SHORT_DIGITS };
    let (mut pages, mut n, mut bytes) = (Pages::of(&*store), 0, 0);
    // The first page is read before anything is written: for a store that cannot list only the error is shown.
    let mut next = pages.next().await?;
    if !args.json {
        line(&hidden, &row(width, ["KEY", "BYTES", "AGE", "MODALITY", "ROWS", "TYPE", "ENCODER"]))?;
    }
    let limit = args.limit.unwrap_or(usize::MAX);
    while let Some(mut page) = next {
        page.truncate(limit - n);
        let keys: Vec<_> = page.iter().map(|listed| listed.key).collect();
        let heads = store.heads(&keys).await.map_err(|e| failed(&e))?;
        for (listed, head) in page.iter().zip(heads) {
            n += 1;
            bytes += listed.len;
            let text = match args.json {
                true => json(listed, head.as_ref()).to_string(),
                false => cells(width, listed, head.as_ref()),
            };
            line(&hidden, &text)?;
        }
        next = if n < limit { pages.next().await? } else { None };
    }
    if !args.json {
        let bytes = bytes_text(usize::try_from(bytes).unwrap_or(usize::MAX));
        note(&hidden, &format!("{} objects, {bytes}", count(n)));
    }
    Ok(())
}

fn cells(width: usize, listed: &Listed, head: Option<&EncodedItem>) -> String {
    let dash = || "-".to_owned();
    let key = listed.key.to_string();
    let encoder = head.map_or_else(|| "(no readable head)".to_owned(), |item| item.fingerprint.to_string());
    row(
        width,
        [
            key.get(..width).unwrap_or(&key),
            &bytes_text(usize::try_from(listed.len).unwrap_or(usize::MAX)),
            &age(listed.stored).map_or_else(dash, age_text),
            head.map_or("-", |item| item.modality.as_str()),
            &head.map_or_else(dash, |item| count(item.n_tokens as usize)),
            head.map_or("-", |item| item.dtype.as_str()),
            encoder.get(..width).filter(|_| head.is_some()).unwrap_or(&encoder),
        ],
    )
}

fn row(width: usize, cells: [&str; 7]) -> String {
    let [key, bytes, age, modality, rows, dtype, encoder] = cells;
    format!("{key:width$} {bytes:>9} {age:>5}  {modality:8} {rows:>8}  {dtype:5} {encoder}")
}

/// All facts about an object.
pub(super) fn json(listed: &Listed, head: Option<&EncodedItem>) -> Value {
    let stored = listed.stored.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let mut value = json!({
        "key": listed.key.to_string(),
        "bytes": listed.len,
        "stored_unix_s": stored.map(|since| since.as_secs()),
        "readable": head.is_some(),
    });
    if let Some(item) = head {
        value["fingerprint"] = item.fingerprint.to_string().into();
        value["modality"] = item.modality.as_str().into();
        value["rows"] = item.n_tokens.into();
        value["hidden"] = item.hidden.into();
        value["dtype"] = item.dtype.as_str().into();
    }
    value
}
