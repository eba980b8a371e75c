//! A server's own description: its models and its `/metrics`, as vLLM has them (docs.vllm.ai, "Production Metrics").

use serde::Deserialize;
use std::time::Duration;

/// The longest wait for a description.
const PATIENCE: Duration = Duration::from_secs(10);
/// Metric whose labels are the settings of the KV cache.
const CACHE_CONFIG: &str = "vllm:cache_config_info{";

/// Description of a server by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerInfo {
    /// Its URL.
    pub url: String,
    /// Name and version of its engine.
    pub engine: Option<String>,
    /// Tokens that a sequence may have.
    pub max_context: Option<usize>,
    /// Tokens that the KV cache holds.
    pub kv_tokens: Option<usize>,
    /// Tokens of a block of it.
    pub kv_block_tokens: Option<usize>,
    /// Bytes of a token in it.
    pub kv_token_bytes: Option<usize>,
    /// Element type of it, where it is not the model's.
    pub kv_dtype: Option<String>,
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelCard>,
}

#[derive(Deserialize)]
struct ModelCard {
    id: String,
    #[serde(default)]
    max_model_len: Option<usize>,
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

impl ServerInfo {
    /// Asks a server. What it does not tell is left out.
    ///
    /// # Errors
    /// An error of the HTTP client, if it does not list its models.
    pub async fn ask(url: &str, model: &str, api_key: Option<&str>) -> Result<Self, reqwest::Error> {
        let client = reqwest::Client::builder().no_proxy().timeout(PATIENCE).build()?;
        let get = |path: &str| {
            let request = client.get(format!("{url}{path}"));
            match api_key {
                Some(key) => request.bearer_auth(key),
                None => request,
            }
        };
        let list: ModelList = get("/v1/models").send().await?.error_for_status()?.json().await?;
        let text = async |path: &str| get(path).send().await.ok()?.error_for_status().ok()?.text().await.ok();
        let mut info = Self::of_metrics(&text("/metrics").await.unwrap_or_default());
        let version = text("/version").await.and_then(|text| serde_json::from_str::<Version>(&text).ok());
        if let (Some(name), Some(version)) = (&mut info.engine, version) {
            *name = format!("{name} {}", version.version);
        }
        let card = list.data.iter().find(|card| card.id == model);
        Ok(Self { url: url.to_owned(), max_context: card.and_then(|card| card.max_model_len), ..info })
    }

    /// Reads a scrape.
    fn of_metrics(text: &str) -> Self {
        let is_vllm = text.lines().any(|line| line.starts_with("vllm:"));
        let line = text.lines().find_map(|line| line.strip_prefix(CACHE_CONFIG));
        let label = |name: &str| {
            let found = labels(line?).find(|(label, _)| *label == name)?;
            Some(found.1).filter(|value| *value != "None")
        };
        let number = |name: &str| label(name)?.parse::<usize>().ok().filter(|n| *n > 0);
        let block = number("block_size");
        let blocks = number("num_gpu_blocks").zip(block).and_then(|(n, size)| n.checked_mul(size));
        let kv_tokens = number("kv_cache_size_tokens").or(blocks);
        let bytes = number("kv_cache_memory_bytes").zip(kv_tokens).map(|(bytes, n)| bytes / n);
        Self {
            url: String::new(),
            engine: is_vllm.then(|| "vLLM".to_owned()),
            max_context: None,
            kv_tokens,
            kv_block_tokens: block,
            kv_token_bytes: bytes.filter(|n| *n > 0),
            kv_dtype: label("cache_dtype").filter(|dtype| *dtype != "auto").map(str::to_owned),
        }
    }
}

/// Names and values of labels; values with quotes in them are not read.
fn labels(line: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut rest = line;
    std::iter::from_fn(move || {
        let (name, value) = rest.trim_start_matches(',').split_once("=\"")?;
        let (value, behind) = value.split_once('"')?;
        rest = behind;
        Some((name, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_read_from_the_labels() {
        let text = "# TYPE vllm:cache_config_info gauge\n\
            vllm:cache_config_info{block_size=\"16\",cache_dtype=\"fp8\",engine=\"0\",kv_cache_memory_bytes=\"8192000\",\
            kv_cache_size_tokens=\"None\",num_gpu_blocks=\"500\"} 1.0\n";
        let info = ServerInfo::of_metrics(text);
        assert_eq!(
            (info.kv_tokens, info.kv_block_tokens, info.kv_token_bytes),
            (Some(8000), Some(16), Some(1024))
        );
        assert_eq!((info.kv_dtype.as_deref(), info.engine.as_deref()), (Some("fp8"), Some("vLLM")));
        let told = text.replace("\"None\"", "\"7777\"");
        assert_eq!(
            ServerInfo::of_metrics(&told).kv_tokens,
            Some(7777),
            "what it says counts before a product"
        );
    }

    /// A server that answers these paths and no others; its URL.
    async fn server(answers: &'static [(&'static str, &'static str)]) -> String {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        triptych_runtime::tls::install_provider();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("its address"));
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut head = vec![0; 4096];
                let n = stream.read(&mut head).await.unwrap_or(0);
                let head = String::from_utf8_lossy(&head[..n]).into_owned();
                let found = answers.iter().find(|(path, _)| head.starts_with(&format!("GET {path} ")));
                let (status, body) = found.map_or(("404 Not Found", ""), |(_, body)| ("200 OK", *body));
                let n = body.len();
                let answer =
                    format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {n}\r\n\r\n{body}");
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        url
    }

    #[tokio::test]
    async fn a_server_is_asked_for_its_version_context_and_cache() {
        let url = server(&[
            ("/v1/models", r#"{"data":[{"id":"other"},{"id":"m","max_model_len":2048}]}"#),
            ("/version", r#"{"version":"0.32.0"}"#),
            ("/metrics", "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"10\"} 1\n"),
        ])
        .await;
        let info = ServerInfo::ask(&url, "m", Some("key")).await.expect("a description");
        assert_eq!((info.engine.as_deref(), info.max_context), (Some("vLLM 0.32.0"), Some(2048)));
        assert_eq!((info.kv_tokens, info.url), (Some(160), url));
        let plain = server(&[("/v1/models", r#"{"data":[{"id":"m"}]}"#)]).await;
        let info = ServerInfo::ask(&plain, "m", None).await.expect("a description");
        assert_eq!(info, ServerInfo { url: plain, ..ServerInfo::default() }, "the rest is not told");
        let nobody = server(&[]).await;
        assert!(ServerInfo::ask(&nobody, "m", None).await.is_err());
    }

    #[test]
    fn a_server_that_tells_nothing_or_nonsense_is_described_by_nothing() {
        for text in ["", "up 1\n", "vllm_cache 1"] {
            assert_eq!(ServerInfo::of_metrics(text), ServerInfo::default(), "{text}");
        }
        let huge = format!("{CACHE_CONFIG}block_size=\"{0}\",num_gpu_blocks=\"{0}\"}} 1", usize::MAX);
        assert_eq!(ServerInfo::of_metrics(&huge).kv_tokens, None);
        for text in ["x", "block_size=\"", "block_size=\"16", "=\"\",\"=\"=\""] {
            let _ = ServerInfo::of_metrics(&format!("{CACHE_CONFIG}{text}"));
        }
    }
}
