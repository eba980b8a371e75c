//! Flags of encoder graphs.

use clap::Args;
use clap::builder::FalseyValueParser;
use std::ffi::OsString;
use triptych_models::encoder::EncoderGraphConfig;

/// Encoder forwards that a GPU captures once and replays.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Encoder graphs, on a GPU only")]
pub struct EncoderGraphArgs {
    /// Encode without CUDA graphs
    #[arg(long, env = "TRIPTYCH_NO_ENCODER_GRAPHS", value_parser = FalseyValueParser::new())]
    pub no_encoder_graphs: bool,
    /// Output tokens of the forwards that are captured as CUDA graphs, parted by commas. A batch is padded to the smallest that
    /// it fits, and encoded without a graph if it fits none. Each keeps its activations in GPU memory. Default: each twice
    /// the one before, up to 8192 rows of the encoder's layers
    #[arg(long, value_name = "TOKENS,…", env = "TRIPTYCH_ENCODER_GRAPH_BUDGETS", value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(1..))]
    pub encoder_graph_budgets: Vec<u32>,
    /// Items of a captured forward, at most, and no more than the tokens of the smallest
    #[arg(long, value_name = "N", env = "TRIPTYCH_ENCODER_GRAPH_MAX_ITEMS", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub encoder_graph_max_items: u32,
    /// MiB of GPU memory for the captured forwards of an encoder. What finds no memory is encoded without a graph
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_ENCODER_GRAPH_MIB", default_value_t = 4096)]
    pub encoder_graph_mib: u32,
}

impl EncoderGraphArgs {
    /// The settings; `None`: no graphs.
    pub fn config(&self) -> Option<EncoderGraphConfig> {
        let size = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
        (!self.no_encoder_graphs).then(|| EncoderGraphConfig {
            budgets: self.encoder_graph_budgets.iter().copied().map(size).collect(),
            max_items: size(self.encoder_graph_max_items),
            max_bytes: size(self.encoder_graph_mib).saturating_mul(1 << 20),
        })
    }

    /// The flags, for a child.
    pub fn to_flags(&self) -> Vec<OsString> {
        let mut flags: Vec<OsString> = vec![
            "--encoder-graph-max-items".into(),
            self.encoder_graph_max_items.to_string().into(),
            "--encoder-graph-mib".into(),
            self.encoder_graph_mib.to_string().into(),
        ];
        if self.no_encoder_graphs {
            flags.push("--no-encoder-graphs".into());
        }
        for budget in &self.encoder_graph_budgets {
            flags.extend(["--encoder-graph-budgets".into(), budget.to_string().into()]);
        }
        flags
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        graphs: EncoderGraphArgs,
    }

    #[test]
    fn flags_written_for_a_child_read_back_the_same() {
        let check = |line: &str, expect: Option<EncoderGraphConfig>| {
            let first = Flags::parse_from(line.split(' '));
            let second = Flags::parse_from(std::iter::once("x".into()).chain(first.graphs.to_flags()));
            assert_eq!(format!("{first:?}"), format!("{second:?}"));
            assert_eq!(second.graphs.config(), expect, "{line}");
        };
        check("x", Some(EncoderGraphConfig::default()));
        check("x --no-encoder-graphs", None);
        let given = EncoderGraphConfig { budgets: vec![64, 256], max_items: 4, max_bytes: 100 << 20 };
        let line = "x --encoder-graph-budgets 64,256 --encoder-graph-max-items 4 --encoder-graph-mib 100";
        check(line, Some(given));
        assert!(Flags::try_parse_from(["x", "--encoder-graph-budgets", "0"]).is_err());
    }
}
