//! All children: started at once, stopped in order.

use super::child::{Keeper, Lost, Orders};
use super::plan::{ClusterPlan, Role};
use super::screen::Screen;
use super::signals::Signals;
use crate::error::CliError;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The order of stopping: nothing new comes in, then work ends, and what the work needs ends last.
const STOP_ORDER: [&[Role]; 3] = [&[Role::Proxy], &[Role::Encoder, Role::Pd], &[Role::Store]];

/// Running children.
pub struct Cluster {
    children: Vec<KeptChild>,
    lost: mpsc::Receiver<Lost>,
    ready: CancellationToken,
    kill: CancellationToken,
    screen: Screen,
}

struct KeptChild {
    role: Role,
    stop: CancellationToken,
    /// Ends with the error of a child that did not stop well.
    keeper: JoinHandle<Option<String>>,
}

impl Cluster {
    /// Starts every child.
    ///
    /// # Errors
    /// [`CliError::Failed`] if this binary cannot be found again.
    pub fn start(plan: &ClusterPlan, screen: &Screen) -> Result<Self, CliError> {
        let exe = std::env::current_exe().map_err(|e| CliError::failed("cannot find this binary", &e))?;
        let ready = CancellationToken::new();
        let kill = CancellationToken::new();
        let (report_lost, lost) = mpsc::channel(plan.children.len().max(1));
        let start = |spec: &super::plan::ChildSpec| {
            let orders = Orders { ready: ready.clone(), stop: CancellationToken::new(), kill: kill.clone() };
            let stop = orders.stop.clone();
            let role = spec.role;
            let report_lost = report_lost.clone();
            let keeper = Keeper { spec: spec.clone(), exe: exe.clone(), screen: screen.clone(), orders };
            let name = spec.name.clone();
            let keeper = tokio::spawn(async move {
                let stopped = keeper.keep().await.unwrap_or_else(|lost| {
                    // The channel has a place for each child.
                    let _ = report_lost.try_send(lost);
                    None
                });
                stopped.map(|error| format!("{name}: {error}"))
            });
            KeptChild { role, stop, keeper }
        };
        let children = plan.children.iter().map(start).collect();
        Ok(Self { children, lost, ready, kill, screen: screen.clone() })
    }

    /// Cancel it when all children were ready at the same time: from then on none is given up.
    pub fn ready(&self) -> CancellationToken {
        self.ready.clone()
    }

    /// Ends when a child cannot start.
    pub async fn lost(&mut self) -> Lost {
        match self.lost.recv().await {
            Some(lost) => lost,
            // All keepers have ended without a loss: they were stopped.
            None => std::future::pending().await,
        }
    }

    /// Stops every child in order. At a signal meanwhile none has time to drain any more.
    ///
    /// # Errors
    /// [`CliError::Failed`] with the errors of children that did not stop well: a proxy that had to cut requests.
    pub async fn stop(self, signals: &mut Signals) -> Result<(), CliError> {
        self.screen.end_progress();
        self.screen.say("stopping; Ctrl-C again ends running requests with an error");
        let kill = self.kill.clone();
        let errors = tokio::select! {
            errors = self.stop_in_order() => errors,
            never = async {
                signals.next().await;
                kill.cancel();
                std::future::pending().await
            } => never,
        };
        if errors.is_empty() { Ok(()) } else { Err(CliError::Failed(errors.join("; "))) }
    }

    async fn stop_in_order(self) -> Vec<String> {
        let mut errors = Vec::new();
        let mut children = self.children;
        for roles in STOP_ORDER {
            let (now, later): (Vec<_>, Vec<_>) = children.into_iter().partition(|c| roles.contains(&c.role));
            now.iter().for_each(|c| c.stop.cancel());
            for child in now {
                // Ends early only for a keeper that panicked, whose child died with it.
                errors.extend(child.keeper.await.ok().flatten());
            }
            children = later;
        }
        self.screen.say("stopped");
        errors
    }
}
