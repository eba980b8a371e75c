//! Flags of a proxy's bounds on requests, connections and attempts.

use clap::Args;
use std::ffi::OsString;
use std::time::Duration;
use triptych_proxy::{ClientTimes, ConnectionBounds, EncodePolicy, RequestBounds, Roles, SessionBounds};

/// Bounds of a proxy.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Bounds of the proxy")]
pub struct BoundArgs {
    /// Answers of a request (`n`)
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_N", default_value_t = RequestBounds::default().n,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(RequestBounds::default().n)))]
    pub max_n: u32,
    /// Beams of a request
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_BEAMS", default_value_t = RequestBounds::default().beams,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(RequestBounds::default().beams)))]
    pub max_beams: u32,
    /// Stop strings of a request
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_STOPS", default_value_t = RequestBounds::default().stops as u32,
          value_parser = clap::value_parser!(u32).range(0..=RequestBounds::default().stops as i64))]
    pub max_stops: u32,
    /// Take a chat template from a request (`chat_template`), which is run by PD workers with a bound on its instructions, not
    /// on its memory: for clients that are trusted with that
    #[arg(long, env = "TRIPTYCH_TRUST_REQUEST_CHAT_TEMPLATE")]
    pub trust_request_chat_template: bool,
    /// Live transcriptions of a tenant at once (`/v1/realtime`)
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_REALTIME_SESSIONS",
          default_value_t = SessionBounds::default().per_tenant as u32,
          value_parser = clap::value_parser!(u32).range(0..=1 << 16))]
    pub max_realtime_sessions: u32,
    /// Seconds that a live transcription may last
    #[arg(long, value_name = "S", env = "TRIPTYCH_MAX_REALTIME_TIME",
          default_value_t = SessionBounds::default().longest.as_secs(),
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub max_realtime_time: u64,
    /// Open connections of the HTTP API; further ones wait to be accepted
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_CONNECTIONS",
          default_value_t = ConnectionBounds::default().connections as u32,
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub max_connections: u32,
    /// KiB of the head of an HTTP request, its headers
    #[arg(long, value_name = "KIB", env = "TRIPTYCH_MAX_HEAD_KIB",
          default_value_t = ConnectionBounds::default().head_bytes as u32 >> 10,
          value_parser = clap::value_parser!(u32).range(8..=1024))]
    pub max_head_kib: u32,
    /// Seconds for the head of a request, and for a connection between two; over gRPC, for the first bytes of a connection
    #[arg(long, value_name = "S", env = "TRIPTYCH_HEAD_TIMEOUT", default_value_t = ClientTimes::default().head.as_secs(),
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub head_timeout: u64,
    /// Seconds between two pieces of an HTTP body
    #[arg(long, value_name = "S", env = "TRIPTYCH_BODY_IDLE_TIMEOUT",
          default_value_t = ClientTimes::default().body_idle.as_secs(),
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub body_idle_timeout: u64,
    /// Seconds that one encode job may take at one encoder worker, before it is sent to another
    #[arg(long, value_name = "S", env = "TRIPTYCH_ENCODE_ATTEMPT_TIMEOUT",
          default_value_t = EncodePolicy::default().attempt_time.as_secs(),
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub encode_attempt_timeout: u64,
    /// Seconds that an item waits for an encoder worker to be there at all, as while one restarts
    #[arg(long, value_name = "S", env = "TRIPTYCH_ENCODER_WAIT",
          default_value_t = EncodePolicy::default().encoder_wait.as_secs(),
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub encoder_wait: u64,
    /// Workers that encode where PD workers hold encoders (--with-encoder): `auto`, those that the work at hand leaves to
    /// encodes, or else each for its own requests; `fixed`, encoder workers, and PD workers only where there are none or none is
    /// able
    #[arg(long, value_name = "ROLES", env = "TRIPTYCH_ROLES", default_value_t = Roles::default())]
    pub roles: Roles,
}

impl BoundArgs {
    /// The flags, for a child.
    pub fn to_flags(self) -> Vec<OsString> {
        let flags = [
            ("--max-n", u64::from(self.max_n)),
            ("--max-beams", self.max_beams.into()),
            ("--max-stops", self.max_stops.into()),
            ("--max-connections", self.max_connections.into()),
            ("--max-head-kib", self.max_head_kib.into()),
            ("--head-timeout", self.head_timeout),
            ("--body-idle-timeout", self.body_idle_timeout),
            ("--encode-attempt-timeout", self.encode_attempt_timeout),
            ("--encoder-wait", self.encoder_wait),
            ("--max-realtime-sessions", u64::from(self.max_realtime_sessions)),
            ("--max-realtime-time", self.max_realtime_time),
        ];
        let roles = ["--roles".into(), self.roles.as_str().into()];
        let trusts = self.trust_request_chat_template.then(|| "--trust-request-chat-template".into());
        let set = flags.into_iter().flat_map(|(flag, n)| [flag.into(), n.to_string().into()]);
        set.chain(roles).chain(trusts).collect()
    }

    /// Bounds on a request's settings.
    pub fn request(&self) -> RequestBounds {
        RequestBounds {
            n: self.max_n,
            beams: self.max_beams,
            stops: self.max_stops as usize,
            chat_templates: self.trust_request_chat_template,
        }
    }

    /// Bounds on live transcriptions.
    pub fn sessions(&self) -> SessionBounds {
        let longest = Duration::from_secs(self.max_realtime_time);
        SessionBounds { per_tenant: self.max_realtime_sessions as usize, longest }
    }

    /// Bounds on connections.
    pub fn connections(&self) -> ConnectionBounds {
        let head_bytes = (self.max_head_kib as usize) << 10;
        ConnectionBounds { connections: self.max_connections as usize, head_bytes }
    }

    /// Patience with clients.
    pub fn times(&self) -> ClientTimes {
        let seconds = Duration::from_secs;
        ClientTimes { head: seconds(self.head_timeout), body_idle: seconds(self.body_idle_timeout) }
    }

    /// Rules by which items are encoded.
    pub fn encodes(&self) -> EncodePolicy {
        let attempt_time = Duration::from_secs(self.encode_attempt_timeout);
        let encoder_wait = Duration::from_secs(self.encoder_wait);
        EncodePolicy { attempt_time, encoder_wait, ..EncodePolicy::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        bounds: BoundArgs,
    }

    #[test]
    fn the_defaults_are_those_of_the_library_and_each_can_be_set() {
        let defaults = Flags::parse_from(["x"]).bounds;
        assert_eq!(
            (defaults.request(), defaults.connections()),
            (RequestBounds::default(), ConnectionBounds::default())
        );
        assert_eq!(defaults.sessions(), SessionBounds::default());
        assert_eq!((defaults.times(), defaults.encodes()), (ClientTimes::default(), EncodePolicy::default()));
        let set = ["x", "--max-n", "2", "--max-beams", "3", "--max-stops", "0", "--max-connections", "5"];
        let more = ["--max-head-kib", "9", "--head-timeout", "6", "--body-idle-timeout", "7"];
        let last = [
            "--encode-attempt-timeout",
            "8",
            "--encoder-wait",
            "9",
            "--trust-request-chat-template",
            "--roles",
            "auto",
        ];
        let sessions = ["--max-realtime-sessions", "4", "--max-realtime-time", "60"];
        let all = set.into_iter().chain(more).chain(last).chain(sessions);
        let set = Flags::parse_from(all).bounds;
        let again = Flags::parse_from(["x".into()].into_iter().chain(set.to_flags())).bounds;
        assert_eq!(format!("{again:?}"), format!("{set:?}"), "a child has the same");
        assert_eq!(set.request(), RequestBounds { n: 2, beams: 3, stops: 0, chat_templates: true });
        assert_eq!(set.connections(), ConnectionBounds { connections: 5, head_bytes: 9 << 10 });
        assert_eq!(set.sessions(), SessionBounds { per_tenant: 4, longest: Duration::from_secs(60) });
        let encodes = set.encodes();
        assert_eq!(
            (encodes.attempt_time, encodes.encoder_wait),
            (Duration::from_secs(8), Duration::from_secs(9))
        );
        assert_eq!(set.roles, Roles::Auto);
        let times = ClientTimes { head: Duration::from_secs(6), body_idle: Duration::from_secs(7) };
        assert_eq!(set.times(), times);
        for wrong in [["--max-n", "17"], ["--max-beams", "0"], ["--max-head-kib", "7"], ["--roles", "x"]] {
            assert!(Flags::try_parse_from(["x"].into_iter().chain(wrong)).is_err(), "{wrong:?}");
        }
    }
}
