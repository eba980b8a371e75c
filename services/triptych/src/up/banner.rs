//! Text for the user when the cluster is ready: addresses, models, and two commands to try.

use super::plan::{ClusterPlan, Role};
use crate::model::CheckedModel;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;
use triptych_core::Modality;

/// The port at which `ask` looks by itself.
const DEFAULT_GRPC: &str = "127.0.0.1:50051";
/// The repository's sample image and audio file, if `up` runs in a clone.
const SCENE: &str = "tests/models/heldout/scene.png";
const DIGITS: &str = "tests/models/heldout/digits.wav";

/// The banner.
pub fn text(plan: &ClusterPlan, models: &[CheckedModel], took: Duration) -> String {
    let mut text = format!(
        "\nTriptych is ready after {:.1} s: {}, {}, 1 proxy; encoder outputs in {}\n\n",
        took.as_secs_f64(),
        count(plan.count(Role::Encoder), "encoder"),
        count(plan.count(Role::Pd), "PD worker"),
        plan.store,
    );
    let http = plan.endpoints.local_http();
    let grpc = plan.endpoints.local_grpc();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "  OpenAI API   http://{http}/v1");
    let _ = writeln!(text, "  gRPC         {grpc}");
    let _ = writeln!(text, "  metrics      http://{http}/metrics");
    let _ = writeln!(text, "  EC store     {}", plan.store_address);
    for (i, model) in models.iter().enumerate() {
        let label = if i == 0 { "models" } else { "" };
        let reads: Vec<_> = model.modalities.iter().map(|m| m.as_str()).collect();
        let reads = if reads.is_empty() { "its prompt alone".to_owned() } else { reads.join(", ") };
        let _ = writeln!(text, "  {label:12} {} ({reads})", model.name);
    }
    text.push_str("\nTry in another terminal:\n\n");
    for command in commands(models, &grpc.to_string(), &http.to_string()) {
        let _ = writeln!(text, "  {command}");
    }
    let _ = writeln!(text, "  {}", list_command(&plan.store_address));
    text.push_str("\nCtrl-C stops the cluster.\n\n");
    text
}

fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

fn commands(models: &[CheckedModel], grpc: &str, http: &str) -> Vec<String> {
    let program = program();
    let place = if grpc == DEFAULT_GRPC { String::new() } else { format!(" --grpc {grpc}") };
    let reader = |modality| models.iter().find(|m| m.modalities.contains(&modality));
    let mut commands = Vec::new();
    if let Some(model) = reader(Modality::Image) {
        let file = example(SCENE, "IMAGE.png");
        let name = model_flag(model, models, Modality::Image);
        commands.push(format!("{program} ask \"What is in this picture?\" --image {file}{name}{place}"));
    }
    if let Some(model) = reader(Modality::Audio) {
        let file = example(DIGITS, "SPEECH.wav");
        let name = model_flag(model, models, Modality::Audio);
        commands.push(format!("{program} ask --audio {file}{name}{place}"));
    }
    if let (true, Some(model)) = (commands.is_empty(), models.iter().find(|m| !m.has_encoder())) {
        let name = if models.len() > 1 { format!(" --model {}", model.name) } else { String::new() };
        commands.push(format!("{program} ask \"Name three colours.\"{name}{place}"));
    }
    if commands.len() < 2 {
        commands.push(format!("curl http://{http}/v1/models"));
    }
    commands
}

/// Lists the encoder outputs; tiers have white space between them, and some shells look for files by a `?`.
fn list_command(store: &str) -> String {
    let quote = if store.contains(|c: char| c.is_whitespace() || c == '?') { "'" } else { "" };
    format!("{} ec ls --ec {quote}{store}{quote}", program())
}

fn program() -> String {
    std::env::args().next().unwrap_or_else(|| "triptych".into())
}

/// The proxy finds the model by itself where only one reads the item.
fn model_flag(model: &CheckedModel, models: &[CheckedModel], modality: Modality) -> String {
    let readers = models.iter().filter(|m| m.modalities.contains(&modality)).count();
    if readers > 1 { format!(" --model {}", model.name) } else { String::new() }
}

fn example(file: &'static str, otherwise: &'static str) -> &'static str {
    if Path::new(file).is_file() { file } else { otherwise }
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_core::ModelName;

    fn model(name: &str, modality: Modality) -> CheckedModel {
        CheckedModel {
            name: ModelName::new(name),
            modalities: vec![modality],
            towers: Vec::new(),
            dir: "/m".into(),
        }
    }

    #[test]
    fn the_store_can_be_listed_by_what_is_printed() {
        for (store, expect) in [
            ("grpc://127.0.0.1:7", " ec ls --ec grpc://127.0.0.1:7"),
            ("shm disk:/a b", " ec ls --ec 'shm disk:/a b'"),
            ("shm:/a/slab?mib=1", " ec ls --ec 'shm:/a/slab?mib=1'"),
        ] {
            let command = list_command(store);
            assert!(command.ends_with(expect), "{command}");
        }
    }

    #[test]
    fn there_are_always_two_commands_and_they_fit_what_is_served() {
        let eyes = model("eyes", Modality::Image);
        let ears = model("ears", Modality::Audio);
        let both = commands(&[eyes.clone(), ears.clone()], DEFAULT_GRPC, "127.0.0.1:8080");
        assert!(both[0].contains("--image") && both[1].contains("--audio") && both.len() == 2);
        assert!(!both[0].contains("--grpc") && !both[0].contains("--model"));
        let one = commands(&[ears], "127.0.0.1:9", "127.0.0.1:8080");
        assert!(one[0].contains("--audio") && one[0].contains("--grpc 127.0.0.1:9"));
        assert!(one[1].starts_with("curl ") && one.len() == 2);
        let text = CheckedModel { modalities: Vec::new(), ..model("text", Modality::Image) };
        let alone = commands(&[text], DEFAULT_GRPC, "127.0.0.1:8080");
        assert!(
            alone[0].ends_with(" ask \"Name three colours.\"") && alone[1].starts_with("curl "),
            "{alone:?}"
        );
        let two = commands(&[eyes.clone(), model("more-eyes", Modality::Image)], DEFAULT_GRPC, "h");
        assert!(two[0].contains("--model eyes"));
    }
}
