//! The policy of the fetcher: the URLs and addresses that it may reach.

use super::address::not_public;
use reqwest::Url;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;
use thiserror::Error;
use url::Host;

/// The operator's word on item URLs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchPolicy {
    /// Reach of URLs. Default: public addresses.
    pub reach: Reach,
    /// Hosts and networks that may be reached whatever they are; default none.
    pub allow: Vec<AllowRule>,
    /// For one item, redirects included. Default 20 s.
    pub timeout: Duration,
}

impl Default for FetchPolicy {
    fn default() -> Self {
        Self { reach: Reach::Public, allow: Vec::new(), timeout: Duration::from_secs(20) }
    }
}

/// Reach of URLs, beside the hosts that are allowed by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Nowhere else.
    Listed,
    /// Public addresses.
    Public,
    /// Private addresses too. Only where every client is trusted with what this machine can reach.
    Private,
}

/// One entry of the allow-list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowRule {
    /// This host: `images.example.com`.
    Host(String),
    /// Every host below this one: `*.example.com`.
    Below(String),
    /// Every address of a network: `10.1.0.0/16`, `::1`.
    Network {
        /// Its address.
        address: IpAddr,
        /// Leading bits that count.
        prefix: u8,
    },
}

/// A text that is no entry of an allow-list.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[error("{text:?} is not a host, `*.` and a host, or a network such as 10.1.0.0/16")]
pub struct NotARule {
    /// As given.
    pub text: String,
}

/// A host or an address that may not be reached.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub(super) enum Refused {
    #[error("the URL's scheme is {0:?}, allowed are http and https")]
    Scheme(String),
    #[error("the URL has no host")]
    NoHost,
    #[error("the URL leads to an address that is {0}, which this server does not fetch from")]
    Address(&'static str),
    #[error("the URL leads to a host that is not on this server's allow-list")]
    NotListed,
    #[error("the URL's host is not known")]
    Unknown,
}

impl FromStr for AllowRule {
    type Err = NotARule;

    fn from_str(text: &str) -> Result<Self, NotARule> {
        let wrong = || NotARule { text: text.to_owned() };
        let (place, prefix) = match text.split_once('/') {
            Some((place, prefix)) => (place, Some(prefix.parse::<u8>().map_err(|_| wrong())?)),
            None => (text, None),
        };
        if let Ok(address) = place.parse::<IpAddr>() {
            let bits = if address.is_ipv4() { 32 } else { 128 };
            return match prefix.unwrap_or(bits) {
                prefix if prefix <= bits => Ok(Self::Network { address, prefix }),
                _ => Err(wrong()),
            };
        }
        let (below, host) = match place.strip_prefix("*.") {
            Some(host) => (true, host),
            None => (false, place),
        };
        match (prefix, Host::parse(host)) {
            (None, Ok(Host::Domain(host))) if below => Ok(Self::Below(host)),
            (None, Ok(Host::Domain(host))) => Ok(Self::Host(host)),
            _ => Err(wrong()),
        }
    }
}

impl AllowRule {
    fn allows_host(&self, name: &str) -> bool {
        match self {
            Self::Host(host) => name.eq_ignore_ascii_case(host),
            Self::Below(host) => {
                name.len().checked_sub(host.len()).and_then(|at| name.split_at_checked(at)).is_some_and(
                    |(head, tail)| head.len() > 1 && head.ends_with('.') && tail.eq_ignore_ascii_case(host),
                )
            }
            Self::Network { .. } => false,
        }
    }

    fn allows_address(&self, address: IpAddr) -> bool {
        match self {
            Self::Network { address: IpAddr::V4(network), prefix } => match address {
                IpAddr::V4(a) => {
                    same_bits(a.to_bits().into(), network.to_bits().into(), 32 - u32::from(*prefix))
                }
                IpAddr::V6(_) => false,
            },
            Self::Network { address: IpAddr::V6(network), prefix } => match address {
                IpAddr::V6(a) => same_bits(a.to_bits(), network.to_bits(), 128 - u32::from(*prefix)),
                IpAddr::V4(_) => false,
            },
            Self::Host(_) | Self::Below(_) => false,
        }
    }
}

/// True if two addresses are the same but for their last `ignored` bits.
fn same_bits(a: u128, b: u128, ignored: u32) -> bool {
    (a ^ b).checked_shr(ignored).unwrap_or(0) == 0
}

impl FetchPolicy {
    /// True if every URL is refused.
    pub(super) fn reaches_nothing(&self) -> bool {
        self.reach == Reach::Listed && self.allow.is_empty()
    }

    /// Judges what can be judged before a name is resolved: the scheme, and a host that is an address. The URL parser
    /// has turned every notation of one (decimal, octal, hexadecimal, short) into the address it stands for.
    pub(super) fn judge_url(&self, url: &Url) -> Result<(), Refused> {
        if !matches!(url.scheme(), "http" | "https") {
            return Err(Refused::Scheme(url.scheme().to_owned()));
        }
        match url.host() {
            Some(Host::Domain(name)) if !name.is_empty() => Ok(()),
            Some(Host::Ipv4(address)) => self.judge_address(None, address.into()),
            Some(Host::Ipv6(address)) => self.judge_address(None, address.into()),
            _ => Err(Refused::NoHost),
        }
    }

    /// Judges an address, and the name that led to it.
    pub(super) fn judge_address(&self, name: Option<&str>, address: IpAddr) -> Result<(), Refused> {
        let name = name.map(|n| n.strip_suffix('.').unwrap_or(n));
        let by_name = |rule: &AllowRule| name.is_some_and(|n| rule.allows_host(n));
        if self.allow.iter().any(|rule| by_name(rule) || rule.allows_address(address)) {
            return Ok(());
        }
        match self.reach {
            Reach::Private => Ok(()),
            Reach::Public => not_public(address).map_or(Ok(()), |why| Err(Refused::Address(why))),
            Reach::Listed => Err(Refused::NotListed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(reach: Reach, allow: &[&str]) -> FetchPolicy {
        let allow = allow.iter().map(|r| r.parse().unwrap()).collect();
        FetchPolicy { reach, allow, ..FetchPolicy::default() }
    }

    #[test]
    fn loopback_is_refused_in_every_notation() {
        let policy = FetchPolicy::default();
        for host in [
            "127.0.0.1",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0x7f.0.0.1",
            "0177.0.0.1",
            "017700000001",
            "127.0.0.1.",
            "127。0。0。1",
            "１２７.0.0.1",
            "%31%32%37.0.0.1",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "[::ffff:7f00:1]",
            "[0:0:0:0:0:ffff:7f00:0001]",
            "[::127.0.0.1]",
            "[64:ff9b::7f00:1]",
            "[2002:7f00:1::]",
            "user:pw@127.0.0.1",
            "0",
            "0.0.0.0",
            "[::]",
        ] {
            let url = Url::parse(&format!("http://{host}/x.png")).unwrap();
            assert!(matches!(policy.judge_url(&url), Err(Refused::Address(_))), "{host}");
        }
    }

    #[test]
    fn only_http_and_https_are_fetched() {
        for url in ["file:///etc/passwd", "ftp://a/b", "gopher://a", "unix:/x", "data:,x", "javascript:1"] {
            let refused = FetchPolicy::default().judge_url(&Url::parse(url).unwrap());
            assert!(matches!(refused, Err(Refused::Scheme(_))), "{url}");
        }
    }

    #[test]
    fn the_list_allows_by_name_and_by_network() {
        let cases = [
            (Reach::Public, &[][..], None, "8.8.8.8", true),
            (Reach::Public, &[], None, "10.0.0.1", false),
            (Reach::Public, &["10.0.0.0/8"], None, "10.9.9.9", true),
            (Reach::Public, &["10.0.0.0/8"], None, "11.0.0.1", true),
            (Reach::Public, &["127.0.0.2"], None, "127.0.0.1", false),
            (Reach::Public, &["::1"], None, "::1", true),
            (Reach::Public, &["fd00::/8"], None, "fd12::1", true),
            (Reach::Public, &["images.local"], Some("IMAGES.local."), "10.0.0.1", true),
            (Reach::Public, &["images.local"], Some("x.images.local"), "10.0.0.1", false),
            (Reach::Public, &["*.local"], Some("a.b.local"), "10.0.0.1", true),
            (Reach::Public, &["*.local"], Some("local"), "10.0.0.1", false),
            (Reach::Public, &["*.local"], Some("notlocal"), "10.0.0.1", false),
            (Reach::Listed, &["8.8.0.0/16"], None, "8.8.8.8", true),
            (Reach::Listed, &["8.8.0.0/16"], None, "9.9.9.9", false),
            (Reach::Listed, &["0.0.0.0/0"], None, "127.0.0.1", true),
            (Reach::Private, &[], None, "127.0.0.1", true),
        ];
        for (reach, allow, name, address, expect) in cases {
            let judged = policy(reach, allow).judge_address(name, address.parse().unwrap());
            assert_eq!(judged.is_ok(), expect, "{reach:?} {allow:?} {name:?} {address}");
        }
    }

    #[test]
    fn a_rule_that_is_none_is_an_error() {
        for text in ["", "10.0.0.0/33", "::/129", "host/8", "a b", "*.", "*.10.0.0.1", "10.0.0.0/x"] {
            assert!(text.parse::<AllowRule>().is_err(), "{text}");
        }
    }
}
