//! Writes and reads objects of a store by hand, the Rust end of the Python package's tests (`services/ec/python/tests`).
//!
//! `write SETTING N_TOKENS HIDDEN DTYPE KIND [KEYS]` stores an output whose rows are BLAKE3's output of its key, and
//! prints the key. `read SETTING KEY [KEYS]` prints the description of a verified object, and the hash of its rows. `key
//! SALT FINGERPRINT MODALITY OPTIONS ITEM` prints a content key. `KEYS` are MAC keys in hex.

use anyhow::{Context, Result, bail};
use triptych_core::key::KeyParts;
use triptych_core::limits::Limits;
use triptych_core::{
    ContentKey, DType, EncodedItem, EncoderOutput, Extent, Fingerprint, Modality, Seconds, WindowSpan,
};
use triptych_ec::object::{self, MacKeys};
use triptych_ec::{EcSetting, open};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["write", setting, n_tokens, hidden, dtype, kind, keys @ ..] => {
            let output = sample(n_tokens.parse()?, hidden.parse()?, dtype, kind)?;
            let object = object::encode_signed(&output, &mac_keys(keys)?);
            let store = open(&setting.parse::<EcSetting>()?, &Limits::default()).await?;
            store.put_if_absent(&output.item().key, object).await?;
            println!("{}", output.item().key);
        }
        ["read", setting, key, keys @ ..] => {
            let key = ContentKey::from_hex(key).context("no key")?;
            let store = open(&setting.parse::<EcSetting>()?, &Limits::default()).await?;
            let head = store.heads(&[key]).await?.pop().flatten().context("no head")?;
            let object = store.get(&key).await?.context("no object")?;
            let output = object::decode_signed(object, &key, &Limits::default(), &mac_keys(keys)?)?;
            if head != *output.item() {
                bail!("the head differs from the object's");
            }
            println!("{:?}|{}|{}", output.item().extent, output.item().dtype, blake3::hash(output.rows()));
        }
        ["key", salt, fingerprint, modality, options, item] => {
            let fingerprint = Fingerprint::of([fingerprint.as_bytes()]);
            let key = ContentKey::of(KeyParts {
                tenant_salt: salt.as_bytes(),
                fingerprint: &fingerprint,
                modality: Modality::parse(modality).context("no modality")?,
                options,
                item: item.as_bytes(),
            });
            println!("{key}");
        }
        _ => bail!("nothing to do"),
    }
    Ok(())
}

fn mac_keys(texts: &[&str]) -> Result<MacKeys> {
    Ok(texts.join(" ").parse()?)
}

fn sample(n_tokens: u32, hidden: u32, dtype: &str, kind: &str) -> Result<EncoderOutput> {
    let key = ContentKey::from_bytes(
        *blake3::hash(format!("{n_tokens} {hidden} {dtype} {kind}").as_bytes()).as_bytes(),
    );
    let seconds = |s| Seconds::new(s).context("no time");
    let spans = [WindowSpan { start_ms: 0, end_ms: 1500 }, WindowSpan { start_ms: 1000, end_ms: 2100 }];
    let (modality, extent) = match kind {
        "image" => (Modality::Image, Extent::Grid { t: 1, h: 2, w: n_tokens * 2 }),
        "audio" => (Modality::Audio, Extent::windows(2, 2100)),
        "overlapping" => {
            (Modality::Audio, Extent::Windows { n_windows: 2, duration_ms: 2100, spans: spans.into() })
        }
        "text" => (Modality::Text, Extent::Tokens),
        "video" => {
            let times = [seconds(0.25)?, seconds(1e-7)?, seconds(1e22)?];
            (
                Modality::Video,
                Extent::Video { t: 3, h: 2, w: 2, interval: seconds(0.1)?, times: times.into() },
            )
        }
        _ => bail!("no kind"),
    };
    let dtype = DType::parse(dtype).context("no dtype")?;
    let fingerprint = Fingerprint::of([b"sample".as_slice()]);
    let item = EncodedItem { key, fingerprint, modality, n_tokens, hidden, dtype, extent, checksum: [0; 32] };
    let mut rows = vec![0; item.payload_len().context("too large")?];
    blake3::Hasher::new().update(key.as_bytes()).finalize_xof().fill(&mut rows);
    Ok(EncoderOutput::seal(item, rows.into())?)
}
