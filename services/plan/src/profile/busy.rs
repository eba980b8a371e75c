//! Share of the machine's time that other processes took during a measurement, from `/proc`.

use std::fs;

/// The machine's time at a moment, in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ticks {
    all: u64,
    idle: u64,
    steal: u64,
    own: u64,
}

/// Watches from its making on.
#[derive(Clone, Debug)]
pub struct BusyWatch {
    cores: Vec<usize>,
    start: Option<Ticks>,
}

/// Parts of the watched cores' time, from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Busy {
    /// Other processes'.
    pub others: f64,
    /// The hypervisor's other guests'.
    pub steal: f64,
}

impl Busy {
    /// Above this a measurement is doubtful.
    pub const DOUBTFUL: f64 = 0.05;

    /// Both.
    pub fn total(self) -> f64 {
        self.others + self.steal
    }
}

impl BusyWatch {
    /// Watches the named cores, or all if none is named.
    pub fn start(cores: &[usize]) -> Self {
        Self { cores: cores.to_vec(), start: now(cores) }
    }

    /// Since the start; `None` if the system does not report it.
    pub fn so_far(&self) -> Option<Busy> {
        Some(between(self.start?, now(&self.cores)?))
    }
}

fn now(cores: &[usize]) -> Option<Ticks> {
    let machine = of_machine(&fs::read_to_string("/proc/stat").ok()?, cores)?;
    Some(Ticks { own: own(&fs::read_to_string("/proc/self/stat").ok()?)?, ..machine })
}

fn between(from: Ticks, to: Ticks) -> Busy {
    let all = to.all.saturating_sub(from.all).max(1) as f64;
    let part = |pick: fn(&Ticks) -> u64| pick(&to).saturating_sub(pick(&from)) as f64 / all;
    let steal = part(|t| t.steal);
    let others = 1.0 - part(|t| t.idle) - steal - part(|t| t.own);
    Busy { others: others.max(0.0), steal }
}

/// `cpu  user nice system idle iowait irq softirq steal …`, and a line for each core.
fn of_machine(stat: &str, cores: &[usize]) -> Option<Ticks> {
    let wanted: Vec<String> = match cores {
        [] => vec!["cpu".to_owned()],
        cores => cores.iter().map(|core| format!("cpu{core}")).collect(),
    };
    let mut ticks = Ticks::default();
    for name in wanted {
        let line = stat.lines().find_map(|line| line.strip_prefix(&name)?.strip_prefix(' '))?;
        let values: Vec<u64> = line.split_whitespace().take(8).map_while(|v| v.parse().ok()).collect();
        let [_, _, _, idle, iowait, _, _, steal] = values[..] else { return None };
        ticks.all += values.iter().sum::<u64>();
        ticks.idle += idle + iowait;
        ticks.steal += steal;
    }
    Some(ticks)
}

/// Fields 14 and 15, after the name in brackets, which may hold anything.
fn own(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(user + system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_shared_between_own_others_and_the_hypervisor() {
        let stat = |user, idle, steal| {
            format!(
                "cpu  {user} 0 0 {idle} 0 0 0 {steal} 0 0\ncpu0 1 0 0 1 0 0 0 0\ncpu1 {user} 0 0 {idle} 0 0 0 {steal}\n"
            )
        };
        let mut from = of_machine(&stat(0, 0, 0), &[]).unwrap();
        from.own = 5;
        let mut to = of_machine(&stat(80, 10, 10), &[]).unwrap();
        to.own = 65;
        let busy = between(from, to);
        assert!((busy.others - 0.2).abs() < 1e-9 && (busy.steal - 0.1).abs() < 1e-9, "{busy:?}");
        assert_eq!(of_machine(&stat(80, 10, 10), &[1]).unwrap().all, 100);
        assert_eq!(of_machine(&stat(1, 1, 1), &[7]), None);
        assert_eq!(own("12 (a) b) S 1 2 3 4 5 6 7 8 9 10 30 12 0 0"), Some(42));
        for bad in ["", "cpu", "cpu  a b", "cpu  1 2 3"] {
            assert_eq!(of_machine(bad, &[]), None, "{bad}");
            assert_eq!(own(bad), None);
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_tells() {
        let busy = BusyWatch::start(&[]).so_far().unwrap();
        assert!((0.0..=1.0).contains(&busy.total()));
    }
}
