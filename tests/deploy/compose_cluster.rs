//! The compose file, run without Docker: each service is a process in its own network namespace, with the user, mounts,
//! variables and host names of the file.

use crate::authority::write_part;
use crate::compose::{ComposeInput, config, roles, services, text, texts, variables};
use crate::container::{Container, Mount};
use crate::dns::Dns;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tempfile::TempDir;
use triptych_tests::cluster::{reqwest_client, sum_series};
use triptych_tests::net::Net;
use triptych_tests::process::{Process, eventually, signal};
use triptych_tests::samples::{ask_images, heldout, list, text_of};
use triptych_tests::tools::{root, tool};

/// Services of third parties whose programs the tests have.
const OTHERS: [&str; 3] = ["prometheus", "redis", "s3"];
const CLIENTS: usize = 4;
/// Answers to wait for after each scaling.
const ANSWERS_PER_STEP: usize = 40;

/// Folder of certificates in the settings.
const TLS_DIR: &str = "/tls";

/// A running container.
struct RunningContainer {
    service: String,
    process: Process,
    /// `Some` for a role of the product; other programs run on the host's root.
    container: Option<Container>,
}

/// The services of the file. Drop kills them, and removes the namespaces.
struct ComposeCluster {
    config: Value,
    running: BTreeMap<String, RunningContainer>,
    dns: Dns,
    /// Named volumes.
    volumes: TempDir,
    // Last: processes are killed before their namespaces are removed.
    net: Net,
}

impl ComposeCluster {
    /// Starts one container of each service that the tests have a program for, in dependency order.
    async fn start(input: ComposeInput) -> Self {
        let net = Net::start();
        let dns = Dns::start(&net.host(1));
        let volumes = tempfile::tempdir().expect("a folder");
        fs::set_permissions(volumes.path(), Permissions::from_mode(0o755)).expect("own folder");
        let mut cluster = Self { config: config(input), running: BTreeMap::new(), dns, volumes, net };
        let others = services(&cluster.config).map(|(name, _)| name).filter(|name| OTHERS.contains(name));
        let services: Vec<String> =
            roles(&cluster.config).map(|(name, _)| name).chain(others).map(str::to_owned).collect();
        let mut waiting = services.clone();
        while !waiting.is_empty() {
            let free = |service: &String| !cluster.needs(service).iter().any(|need| waiting.contains(need));
            let next = waiting.iter().position(free).expect("dependencies that end");
            let service = waiting.remove(next);
            for need in cluster.needs(&service) {
                cluster.wait_healthy(&format!("{need}-1")).await;
            }
            cluster.run(&service, 1);
        }
        for service in services {
            cluster.wait_healthy(&format!("{service}-1")).await;
        }
        cluster
    }

    fn service(&self, name: &str) -> &Value {
        &self.config["services"][name]
    }

    /// Services that must be healthy before this one starts; disabled ones are left out.
    fn needs(&self, service: &str) -> Vec<String> {
        let needs = self.service(service)["depends_on"].as_object();
        let names = needs.into_iter().flatten().map(|(name, _)| name.clone());
        names.filter(|name| self.service(name).is_object()).collect()
    }

    /// Starts container `n` of a service; its name resolves at once.
    fn run(&mut self, service: &str, n: usize) {
        let name = format!("{service}-{n}");
        self.net.add(&name);
        let (container, mut command) = match OTHERS.contains(&service) {
            true => (None, self.other_command(service, &name)),
            false => {
                let container = self.container(service, &name);
                let words =
                    ["/triptych".to_owned()].into_iter().chain(texts(&self.service(service)["command"]));
                let command = container.command(&words.collect::<Vec<_>>());
                (Some(container), command)
            }
        };
        self.dns.add(service, &self.net.address(&name));
        let running = RunningContainer {
            service: service.to_owned(),
            process: Process::spawn(&mut command),
            container,
        };
        self.running.insert(name, running);
    }

    fn container(&self, service: &str, name: &str) -> Container {
        let described = self.service(service);
        let mut container = Container::new(&self.net.host(1));
        container.namespace = Some(self.net.namespace(name));
        container.user = text(&described["user"]).to_owned();
        container.variables.extend(variables(described));
        for volume in described["volumes"].as_array().into_iter().flatten() {
            let target = text(&volume["target"]).to_owned();
            let mode = if volume["read_only"] == true { "ro" } else { "rw" };
            container.mounts.push(Mount { source: self.source(volume), target, mode });
        }
        container
    }

    /// Host path of a volume. A named volume gets the owner and mode of its options.
    fn source(&self, volume: &Value) -> PathBuf {
        let source = text(&volume["source"]);
        if source == TLS_DIR {
            return self.certificates();
        }
        if volume["type"] == "bind" {
            return source.into();
        }
        let folder = self.volumes.path().join(source);
        fs::create_dir_all(&folder).expect("own folder");
        let options = self.config["volumes"][source]["driver_opts"]["o"].as_str().unwrap_or_default();
        let option = |name: &str| {
            options.split(',').filter_map(|o| o.split_once('=')).find(|(n, _)| *n == name).map(|(_, v)| v)
        };
        if let (Some(uid), Some(mode)) = (option("uid"), option("mode")) {
            chown(&folder, uid.parse().ok(), None).expect("root may");
            let mode = u32::from_str_radix(mode, 8).expect("an octal number");
            fs::set_permissions(&folder, Permissions::from_mode(mode)).expect("own folder");
        }
        folder
    }

    /// Certificates for `tls.yaml`, created on first use.
    fn certificates(&self) -> PathBuf {
        let folder = self.volumes.path().join("tls");
        if !folder.exists() {
            fs::create_dir(&folder).expect("own folder");
            write_part(&folder, "triptych");
        }
        folder
    }

    /// The service's command with the host's program, a folder of the test, and the test's name server.
    fn other_command(&self, service: &str, name: &str) -> Command {
        let described = self.service(service);
        let mut words = texts(&described["command"]);
        let program = match service {
            "s3" => {
                let weed = std::env::var_os("TRIPTYCH_WEED").map(PathBuf::from);
                Some(weed.unwrap_or_else(|| root().join(".cache/seaweedfs/weed")))
            }
            "prometheus" => Some(tool(service).get_program().into()),
            // The command starts with the program.
            _ => None,
        };
        words.splice(..0, program.map(|path| path.to_str().expect("a plain path").to_owned()));
        let data = self.volumes.path().join(name);
        fs::create_dir_all(&data).expect("own folder");
        for word in &mut words {
            *word = word.replace("=/data", &format!("={}", data.display()));
            *word = word.replace("=/prometheus", &format!("={}", data.display()));
            *word = word.replace("=/etc/prometheus", &format!("={}", data.display()));
        }
        if service == "prometheus" {
            let rules = root().join("deploy/prometheus");
            let settings = fs::read_to_string(root().join("deploy/compose/prometheus.yml")).expect("a file");
            let settings = settings.replace("/etc/prometheus/rules", rules.to_str().expect("a plain path"));
            fs::write(data.join("prometheus.yml"), settings).expect("own folder");
        }
        let namespace = self.net.namespace(name);
        self.net.name_server(name, &self.net.host(1));
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &namespace]).args(words).envs(variables(described)).current_dir(data);
        command
    }

    /// Runs the service's healthcheck until it passes.
    async fn wait_healthy(&mut self, name: &str) {
        let address = self.net.address(name);
        let running = self.running.get_mut(name).unwrap_or_else(|| panic!("{name} runs"));
        let test = texts(&self.config["services"][&running.service]["healthcheck"]["test"]);
        let (kind, words) = test.split_first().expect("a healthcheck");
        assert_eq!(kind, "CMD", "{name}: no image is known to have a shell");
        eventually(&format!("{name} is healthy"), async || {
            if let Some(status) = running.process.exited() {
                panic!("{name} ended with {status}:\n{}", running.process.log());
            }
            let healthy = match (&running.container, words.iter().find(|word| word.starts_with("http://"))) {
                (Some(container), _) => succeeds(&mut container.command(words)),
                (None, Some(url)) => {
                    let url = url.replace("127.0.0.1", &address);
                    reqwest_client().get(url).send().await.is_ok_and(|answer| answer.status().is_success())
                }
                (None, None) => succeeds(Command::new(&words[0]).args(["-h", &address]).args(&words[1..])),
            };
            healthy.then_some(())
        })
        .await;
    }

    /// Sends SIGTERM as `docker stop` does, and waits for the exit; the name resolves until then.
    async fn stop(&mut self, name: &str) {
        let mut running = self.running.remove(name).unwrap_or_else(|| panic!("{name} runs"));
        signal(running.process.pid(), "TERM");
        let status = running.process.wait().await;
        self.dns.remove(&running.service, &self.net.address(name));
        assert!(status.success(), "{name} ended with {status}:\n{}", running.process.log());
    }

    /// Items that an encoder encoded.
    async fn encodes(&self, name: &str) -> f64 {
        let url = format!("http://{}:9090/metrics", self.net.address(name));
        let text = reqwest_client().get(url).send().await.expect("metrics").text().await.expect("text");
        sum_series(&text, "triptych_encodes_total")
    }

    /// Prometheus' answer at a path of its API.
    async fn prometheus(&self, path: &str) -> Option<Value> {
        let url = format!("http://{}:9090/api/v1/{path}", self.net.address("prometheus-1"));
        let text = reqwest_client().get(&url).send().await.ok()?.text().await.ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Waits until Prometheus sees `n` targets of a role that are up.
    async fn wait_seen(&self, role: &str, n: usize) {
        let query = format!("query?query=count(up%7Bcomponent=%22{role}%22%7D%20==%201)");
        let sees = async || {
            let answer = self.prometheus(&query).await?;
            let seen = answer["data"]["result"][0]["value"][1].as_str()?;
            (seen.parse() == Ok(n)).then_some(())
        };
        eventually(&format!("Prometheus sees {n} of {role}"), sees).await;
    }

    fn http(&self) -> String {
        format!("http://{}:8080", self.net.address("proxy-1"))
    }
}

fn succeeds(command: &mut Command) -> bool {
    let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Questions about images that are new each time.
struct Load {
    http: String,
    client: reqwest::Client,
    questions: Vec<(String, Vec<u8>)>,
    expected: Vec<String>,
    asked: AtomicUsize,
    answered: AtomicUsize,
    enough: AtomicBool,
}

impl Load {
    /// Collects the expected answers before any scaling.
    async fn prepare(http: String) -> Self {
        let lines = list("scenes.jsonl");
        let questions = lines
            .iter()
            .take(6)
            .map(|line| (text(&line["question"]).to_owned(), heldout(text(&line["file"]))));
        let mut load = Self {
            http,
            client: reqwest_client(),
            questions: questions.collect(),
            expected: Vec::new(),
            asked: AtomicUsize::new(0),
            answered: AtomicUsize::new(0),
            enough: AtomicBool::new(false),
        };
        for i in 0..load.questions.len() {
            let answer = load.ask(i).await.unwrap_or_else(|e| panic!("a quiet cluster: {e}"));
            load.expected.push(answer);
        }
        load
    }

    /// Sends question `i`. Bytes after the end of an image change its key and not its pixels, so it has to be encoded.
    async fn ask(&self, i: usize) -> Result<String, String> {
        let (question, image) = &self.questions[i % self.questions.len()];
        let n = self.asked.fetch_add(1, Ordering::Relaxed);
        let image = [&image[..], &n.to_le_bytes()].concat();
        let body = ask_images("shapes-qwen2-vl", question, &[&image]);
        let asked = self.client.post(format!("{}/v1/chat/completions", self.http)).json(&body).send().await;
        let response = asked.map_err(|e| e.to_string())?;
        let status = response.status();
        let answer = response.text().await.map_err(|e| e.to_string())?;
        if !status.is_success() {
            return Err(format!("{status}: {answer}"));
        }
        let answer: Value = serde_json::from_str(&answer).map_err(|e| e.to_string())?;
        Ok(text_of(&answer).to_owned())
    }

    /// Runs a client until the load ends; lost and wrong answers.
    async fn client(&self, first: usize) -> Vec<String> {
        let mut i = first;
        let mut wrong = Vec::new();
        while !self.enough.load(Ordering::Relaxed) {
            match self.ask(i).await {
                Ok(answer) if answer == self.expected[i % self.expected.len()] => {}
                Ok(answer) => wrong.push(format!("another answer: {answer:?}")),
                Err(e) => wrong.push(format!("lost: {e}")),
            }
            self.answered.fetch_add(1, Ordering::Relaxed);
            i += CLIENTS;
        }
        wrong
    }

    /// Waits for `n` further answers.
    async fn more(&self, n: usize) {
        let until = self.answered.load(Ordering::Relaxed) + n;
        let enough = async || (self.answered.load(Ordering::Relaxed) >= until).then_some(());
        eventually("further answers arrive", enough).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn encoders_scale_from_one_to_three_and_back_under_load_and_no_request_is_lost() {
    let full = ComposeInput { env_file: Some("full.env"), ..ComposeInput::default() };
    let mut cluster = ComposeCluster::start(full).await;
    let load = Arc::new(Load::prepare(cluster.http()).await);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|i| {
            let load = Arc::clone(&load);
            tokio::spawn(async move { load.client(i).await })
        })
        .collect();
    load.more(ANSWERS_PER_STEP).await;
    // `--scale encoder=3`
    for n in [2, 3] {
        cluster.run("encoder", n);
    }
    for name in ["encoder-2", "encoder-3"] {
        cluster.wait_healthy(name).await;
        eventually("a new encoder gets work", async || (cluster.encodes(name).await > 0.0).then_some(()))
            .await;
    }
    load.more(ANSWERS_PER_STEP).await;
    for (role, n) in [("proxy", 1), ("pd", 1), ("encoder", 3)] {
        cluster.wait_seen(role, n).await;
    }
    let rules = cluster.prometheus("rules").await.expect("Prometheus answers");
    assert!(
        rules["data"]["groups"].as_array().is_some_and(|groups| !groups.is_empty()),
        "no alerts: {rules}"
    );
    // `--scale encoder=1`
    for name in ["encoder-3", "encoder-2"] {
        cluster.stop(name).await;
    }
    let before = cluster.encodes("encoder-1").await;
    load.more(ANSWERS_PER_STEP).await;
    cluster.wait_seen("encoder", 1).await;
    load.enough.store(true, Ordering::Relaxed);
    let mut wrong = Vec::new();
    for client in clients {
        wrong.extend(client.await.expect("a client does not panic"));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(cluster.encodes("encoder-1").await > before, "the remaining encoder does the work");
    // `docker compose stop`
    for name in ["proxy-1", "encoder-1", "pd-1"] {
        cluster.stop(name).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_small_cluster_over_tls_answers_and_its_workers_refuse_plaintext() {
    let over = ComposeInput {
        over: Some("tls.yaml"),
        variables: &[("TLS_DIR", TLS_DIR)],
        ..ComposeInput::default()
    };
    let mut cluster = ComposeCluster::start(over).await;
    let load = Load::prepare(cluster.http()).await;
    assert_eq!(load.ask(0).await.as_ref(), Ok(&load.expected[0]));
    for (name, port) in [("encoder-1", 7001), ("pd-1", 7002)] {
        let plain = format!("http://{}:{port}/", cluster.net.address(name));
        assert!(reqwest_client().get(plain).send().await.is_err(), "{name} answers plaintext");
    }
    for name in ["proxy-1", "encoder-1", "pd-1"] {
        cluster.stop(name).await;
    }
}
